"""Nothing that could run code when it is read: no pickle in the sources, and none opened by serving."""

import pickle
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("parity-llama-plain")  # with the tests whose artifact this is

ROOT = Path(__file__).parents[2]
ROOMS = ("ir", "models", "frontend", "passes", "backends", "runtime", "ingot")
# Modules that write code into data, and torch's and numpy's ways to them.
CODE_IN_DATA = re.compile(
    r"^\s*(?:import|from)\s+(?:c?[pP]ickle|_pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
    r"|\btorch\.(?:load|save|package)\b|\bnp\.(?:load|save)\(|allow_pickle",
    re.MULTILINE,
)


def test_no_module_reads_or_writes_pickles() -> None:
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 300
    assert [str(path) for path in files if CODE_IN_DATA.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line", ["import pickle", "    from marshal import loads", "x = torch.load(path)", "np.load(path)"]
)
def test_such_a_line_is_found(line: str) -> None:
    assert CODE_IN_DATA.search(f"import json\n{line}\n")
    assert not CODE_IN_DATA.search("from ingot.frontend import unpickled\ntorch.loading(path)\nnp.loadtxt(path)\n")


class Watch:
    """Notes what pickles ask for: CPython tells its audit hooks of each name that one looks up. A hook stays for good,
    so there is one, which can be switched off."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event == "pickle.find_class":
            self.found.append(arguments)

    @contextmanager
    def watching(self) -> Any:
        self.on = True
        try:
            yield
        finally:
            self.on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_loading_and_serving_opens_no_pickle(artifact: Callable[..., Path], watch: Watch) -> None:
    path = artifact("llama-plain", backend="reference")
    with watch.watching():
        llm = LLM(path)
        llm.generate([[5, 6, 7], [9] * 20], SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2))
    assert watch.found == []
    with watch.watching():
        pickle.loads(pickle.dumps(Path("/")))
    assert watch.found  # it would have been heard of
