"""Who may import whom: the contracts in pyproject.toml hold, each of them can fail, and serving stays light."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("ir", "models", "frontend", "passes", "backends", "runtime")
# Folders of the front door, beside `cli`.
FRONT = (
    "bench",
    "compile",
    "convert",
    "debug",
    "export",
    "harness",
    "hub",
    "quantizing",
    "report",
    "rounding",
    "serve",
    "vllm_api",
)
SHELVES = ("artifact", "cache", "diff", "features", "formats", "machine", "numerics", "ops")  # folders of `ir`
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}


def broken_contracts(folder: Path) -> set[str]:
    """The ids of the contracts that the package `ingot` in `folder` breaks."""
    command = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    kept = {key for key, contract in CONTRACTS.items() if f"\n{contract['name']} KEPT" in done.stdout}
    broken = {key for key, contract in CONTRACTS.items() if f"\n{contract['name']} BROKEN" in done.stdout}
    assert kept | broken == set(CONTRACTS), f"no verdict for some contracts\n{done.stdout}{done.stderr}"
    assert (done.returncode != 0) == bool(broken), done.stdout + done.stderr
    return broken


def write_package(folder: Path, imports: list[tuple[str, str]]) -> None:
    """A small `ingot` with every room and folder, and two backends; (importer, imported) are its only imports."""
    modules = ["ingot.__init__", "ingot.cli.__init__", "ingot.cli.main", "ingot.cli.progress", "ingot.ir.program"]
    folders = [*FRONT, "cli.commands", "cli.views", *(f"ir.{shelf}" for shelf in SHELVES)]
    modules += [f"ingot.{folder}.{name}" for folder in folders for name in ("__init__", "part")]
    modules += [f"ingot.{room}.{name}" for room in ROOMS for name in ("__init__", "part")]
    modules += [f"ingot.backends.{b}.{name}" for b in ("one", "two") for name in ("__init__", "emit", "load", "shared")]
    modules += ["ingot.backends.table", "ingot.runtime.engines.engine", "ingot.runtime.loading.loader"]
    modules += [f"ingot.runtime.{folder}.__init__" for folder in ("engines", "loading")]
    modules += [f"ingot.serve.{name}" for name in ("async_llm", "llm", "set_up")]
    modules += [f"ingot.serve.engine.{name}" for name in ("__init__", "client", "process")]
    modules += [f"ingot.serve.{folder}.{name}" for folder in ("http", "parsers") for name in ("__init__", "part")]
    files = {name: folder / (name.replace(".", "/") + ".py") for name in modules}
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for importer, imported in imports:
        with files[importer].open("a") as file:
            file.write(f"import {imported}\n")


ALLOWED = [
    ("ingot.models.part", "ingot.ir.part"),
    ("ingot.frontend.part", "ingot.ir.part"),
    ("ingot.frontend.part", "ingot.models.part"),
    ("ingot.passes.part", "ingot.ir.part"),
    ("ingot.backends.one.emit", "ingot.ir.part"),
    ("ingot.backends.one.load", "ingot.ir.part"),
    ("ingot.backends.one.emit", "ingot.backends.one.shared"),
    ("ingot.backends.one.load", "ingot.backends.one.shared"),
    ("ingot.runtime.part", "ingot.ir.part"),
    ("ingot.runtime.part", "ingot.backends.one.load"),
    ("ingot.runtime.__init__", "ingot.backends.two.load"),
    ("ingot.runtime.part", "ingot.backends.table"),
    *(("ingot.cli.main", f"ingot.{room}.part") for room in ROOMS),
    ("ingot.cli.main", "ingot.cli.commands.part"),
    *(("ingot.cli.commands.part", f"ingot.{folder}.part") for folder in (*FRONT, "cli.views")),
    *(("ingot.compile.part", f"ingot.{room}.part") for room in ROOMS),
    ("ingot.compile.part", "ingot.hub.part"),
    ("ingot.compile.part", "ingot.cli.progress"),
    ("ingot.compile.part", "ingot.ir.numerics.part"),
    ("ingot.hub.part", "ingot.frontend.part"),
    ("ingot.serve.part", "ingot.runtime.part"),
    ("ingot.serve.part", "ingot.hub.__init__"),
    ("ingot.serve.http.part", "ingot.serve.async_llm"),
    ("ingot.serve.http.part", "ingot.serve.parsers.part"),
    ("ingot.serve.async_llm", "ingot.serve.engine.client"),
    ("ingot.serve.engine.process", "ingot.serve.llm"),
    ("ingot.bench.part", "ingot.serve.part"),
    ("ingot.harness.part", "ingot.serve.part"),
    ("ingot.vllm_api.part", "ingot.serve.part"),
    ("ingot.debug.part", "ingot.compile.part"),
    ("ingot.export.part", "ingot.compile.part"),
    ("ingot.convert.part", "ingot.compile.part"),
    ("ingot.export.part", "ingot.backends.one.shared"),
    ("ingot.debug.part", "ingot.cli.views.part"),
    ("ingot.report.part", "ingot.debug.part"),
    ("ingot.report.part", "ingot.bench.part"),
    ("ingot.ir.numerics.part", "ingot.ir.program"),
    ("ingot.ir.ops.part", "ingot.ir.machine.part"),
]

FORBIDDEN = [
    *(("ir", "ingot.ir.part", f"ingot.{room}.part") for room in ROOMS[1:]),
    *(("models", "ingot.models.part", f"ingot.{room}.part") for room in ROOMS[2:]),
    *(("frontend", "ingot.frontend.part", f"ingot.{room}.part") for room in ROOMS[3:]),
    *(("passes", "ingot.passes.part", f"ingot.{room}.part") for room in ("models", "frontend", "backends", "runtime")),
    *(
        ("backends", "ingot.backends.one.load", f"ingot.{room}.part")
        for room in ROOMS
        if room not in ("ir", "backends")
    ),
    *(("runtime", "ingot.runtime.part", f"ingot.{room}.part") for room in ("models", "frontend", "passes")),
    ("runtime", "ingot.runtime.part", "ingot.backends.one.emit"),
    ("runtime", "ingot.backends.one.load", "ingot.backends.two.emit"),
    ("runtime-backends", "ingot.runtime.part", "ingot.backends.one.shared"),
    ("runtime-backends", "ingot.runtime.part", "ingot.backends.part"),
    ("emit-load", "ingot.backends.one.emit", "ingot.backends.one.load"),
    ("emit-load", "ingot.backends.one.shared", "ingot.backends.one.load"),
    ("load-emit", "ingot.backends.one.load", "ingot.backends.one.emit"),
    *(("front-door", f"ingot.{room}.part", "ingot.cli.main") for room in ROOMS),
    ("front-door", "ingot.runtime.__init__", "ingot"),
    ("front-door", "ingot.backends.one.load", "ingot.cli.commands.part"),
    *(("serve", "ingot.serve.part", f"ingot.{folder}.part") for folder in ("bench", "compile", "debug", "report")),
    *(("serve", "ingot.serve.part", f"ingot.{folder}.part") for folder in ("harness", "vllm_api")),
    *(("serve", "ingot.serve.part", f"ingot.{folder}.part") for folder in ("quantizing", "rounding")),
    *(("other-interfaces", "ingot.harness.part", f"ingot.{folder}.part") for folder in ("compile", "cli.commands")),
    *(("other-interfaces", "ingot.harness.part", f"ingot.{folder}.part") for folder in ("quantizing", "rounding")),
    *(("other-interfaces", "ingot.vllm_api.part", f"ingot.{folder}.part") for folder in ("bench", "frontend")),
    *(("serve", "ingot.serve.part", f"ingot.{room}.part") for room in ("models", "frontend", "passes")),
    ("serve", "ingot.serve.part", "ingot.cli.progress"),
    ("server", "ingot.serve.http.part", "ingot.serve.llm"),
    ("server", "ingot.serve.async_llm", "ingot.serve.engine.process"),
    ("server", "ingot.serve.engine.client", "ingot.runtime.engines.engine"),
    *(("compile", "ingot.compile.part", f"ingot.{folder}.part") for folder in ("bench", "debug", "report", "serve")),
    *(("compile", "ingot.compile.part", f"ingot.cli.{name}") for name in ("main", "commands.part", "views.part")),
    *(("hub", "ingot.hub.part", f"ingot.{folder}.part") for folder in FRONT if folder != "hub"),
    *(("hub", "ingot.hub.part", f"ingot.cli.{name}") for name in ("main", "commands.part", "views.part")),
    *(("quantizing", "ingot.quantizing.part", f"ingot.{folder}.part") for folder in FRONT if folder != "quantizing"),
    ("quantizing", "ingot.quantizing.part", "ingot.cli.main"),
    *(("rounding", "ingot.rounding.part", f"ingot.{folder}.part") for folder in FRONT if folder != "rounding"),
    ("rounding", "ingot.rounding.part", "ingot.cli.main"),
    *(("export", "ingot.export.part", f"ingot.{folder}.part") for folder in ("debug", "report", "serve", "cli.views")),
    ("export", "ingot.export.part", "ingot.cli.main"),
    ("compile", "ingot.compile.part", "ingot.export.part"),
    *(
        ("convert", "ingot.convert.part", f"ingot.{folder}.part")
        for folder in ("debug", "export", "serve", "cli.views")
    ),
    ("convert", "ingot.convert.part", "ingot.cli.main"),
    *(
        (folder, f"ingot.{folder}.part", "ingot.convert.part")
        for folder in ("compile", "debug", "export", "hub", "serve")
    ),
    *(("debug", "ingot.debug.part", f"ingot.{folder}.part") for folder in ("bench", "cli.commands", "report", "serve")),
    *(("bench", "ingot.bench.part", f"ingot.{folder}.part") for folder in ("cli.views", "compile", "debug", "report")),
    *(("bench", "ingot.bench.part", f"ingot.{folder}.part") for folder in ("quantizing", "rounding")),
    ("commands", "ingot.cli.views.part", "ingot.cli.commands.part"),
    ("commands", "ingot.report.part", "ingot.cli.main"),
    *(("ir-machine", "ingot.ir.machine.part", f"ingot.ir.{shelf}.part") for shelf in SHELVES[:2]),
    ("ir-machine", "ingot.ir.machine.part", "ingot.ir.program"),
    *(("ir-numerics", f"ingot.ir.{shelf}.part", "ingot.ir.numerics.part") for shelf in ("artifact", "cache", "ops")),
    ("ir-numerics", "ingot.serve.part", "ingot.ir.numerics.part"),
]


def test_the_rooms_keep_the_contracts() -> None:
    assert broken_contracts(ROOT) == set()


def test_what_the_table_allows_is_allowed(tmp_path: Path) -> None:
    write_package(tmp_path, ALLOWED)
    assert broken_contracts(tmp_path) == set()


@pytest.mark.parametrize("contract", sorted(CONTRACTS))
def test_each_contract_can_fail(tmp_path: Path, contract: str) -> None:
    violations = [(importer, imported) for key, importer, imported in FORBIDDEN if key == contract]
    assert violations
    write_package(tmp_path, [*ALLOWED, violations[0]])
    assert contract in broken_contracts(tmp_path)


def test_contracts_name_each_forbidden_import() -> None:
    """The package that a contract has to name is the imported module, or one that holds it."""

    def names(pattern: str, module: str) -> bool:
        return any(fnmatchcase(parent, pattern) for parent in packages(module))

    unnamed = [
        (contract, imported)
        for contract, _, imported in FORBIDDEN
        if not any(names(pattern, imported) for pattern in CONTRACTS[contract]["forbidden_modules"])
    ]
    assert unnamed == []


def packages(module: str) -> list[str]:
    """A module and the packages that hold it: `a.b` and `a` of `a.b`."""
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "importer", "imported"), FORBIDDEN)
def test_each_forbidden_import_is_found(tmp_path: Path, contract: str, importer: str, imported: str) -> None:
    write_package(tmp_path, [*ALLOWED, (importer, imported)])
    assert contract in broken_contracts(tmp_path)


IMPORT_ALL_THAT_SERVES = """
import importlib, json, pkgutil, sys
import torch
before = set(sys.modules)

import ingot.backends, ingot.runtime
names = ["ingot.runtime"]
names += [module.name for module in pkgutil.walk_packages(ingot.runtime.__path__, "ingot.runtime.")]
names += [f"{module.name}.load" for module in pkgutil.iter_modules(ingot.backends.__path__, "ingot.backends.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a backend of which nothing is left to load at run time
        if error.name != name or not name.endswith(".load"):
            raise
print(json.dumps(sorted(set(sys.modules) - before)))
"""

COMPILE_SIDE = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")
COMPILE_ROOMS = ("ingot.frontend", "ingot.passes", "ingot.models")


def test_asking_for_a_model_imports_no_torch() -> None:
    """It is imported when an `LLM` is made, beside the making of a GPU's context."""
    code = "import sys; from ingot import LLM, SamplingParams; LLM, SamplingParams(logprobs=2); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    slow = {
        "torch",
        "numpy",
        "pydantic",
        "tokenizers",
        "jinja2",
        "ingot.runtime.loading.loader",
        "ingot.runtime.engines.engine",
    }
    assert slow & set(done.stdout.split()) == set()


def test_serving_imports_no_compiler() -> None:
    command = [sys.executable, "-c", IMPORT_ALL_THAT_SERVES]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    brought = json.loads(done.stdout)
    heavy = [
        name for name in brought if f"{name}.".startswith(tuple(f"{root}." for root in COMPILE_SIDE + COMPILE_ROOMS))
    ]
    emits = [name for name in brought if name.startswith("ingot.backends.") and "emit" in name.split(".")]
    assert heavy + emits == [], "importing the runtime and every load.py brought these in"
