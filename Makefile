# Each target makes its prerequisites, starting from a fresh clone.
#   make demo      compile the bundled model and generate with it
#   make check     while you work: lint, and the tests of the IR and of the scheduler
#   make test      the tests           make test-all   with the slow ones
#   make lint      format, lint, types, import contracts, words of prose
#   make format    rewrite the files   make docs       regenerate parts of docs/
#   make clean     remove what was made here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

# Tests start some two hundred processes that import the same modules, which are then compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test-core test test-all lint format docs clean
.DELETE_ON_ERROR:

# torch comes first, in a call of its own: where a smaller build of it is offered (CPU only), this call takes it, and the
# second one finds the range satisfied and leaves it alone. --no-compile: of the modules that are installed few are
# imported, and those are compiled when they are; all of them would take half a minute.
# What all tests import of torch is imported while pip installs the rest, which leaves a core idle: compiling those modules
# takes each worker of the tests five seconds otherwise. If it fails, the workers compile them.
OF_TORCH := import torch._inductor.compile_fx, torch.distributed.tensor
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "torch>=2.11,<2.15"
	$(BIN)/python -c "$(OF_TORCH)" >/dev/null 2>&1 & $(BIN)/python -m pip install --quiet --no-compile -e ".[dev]" && wait
	touch $@

demo: $(STAMP)
	rm -rf build/pico.ingot && mkdir -p build
	$(BIN)/compile-model models/pico -o build/pico.ingot
	$(BIN)/ingot run build/pico.ingot "def fibonacci(n):" --max-tokens 64

check: $(STAMP)
	$(MAKE) --jobs=2 lint test-core

test-core: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) tests/ir tests/runtime/scheduling

# loadgroup: tests that share an expensive fixture name it with `xdist_group`, and run in one worker.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --run-slow

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p ingot
	$(BIN)/lint-imports
	$(BIN)/python docs/tools/words.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python docs/tools/generate.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
