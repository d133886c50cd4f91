"""The table of backends: whole, in step with what the command line offers, and light to import."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingot import backends
from ingot.backends.table import BACKENDS, choices
from ingot.cli.commands.compile import compile_checkpoint
from ingot.compile.competing import backend_named
from ingot.ir.backend import Compiler, FunctionBackend, LibraryBuilder, RegionCompiler, Splitter, Tunable
from ingot.ir.errors import TargetError

FOLDER = Path(backends.__file__).parent
DEVICES = ("cpu", "cuda")


@pytest.mark.parametrize(("name", "device"), [(name, one) for name, entry in BACKENDS.items() for one in entry.emit])
def test_an_entry_makes_the_backend_of_its_name(name: str, device: str) -> None:
    try:
        assert backend_named(name, device).name == name
    except TargetError as error:
        assert "not installed" in error.what


def test_every_folder_is_in_the_table() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/emit.py")}
    assert folders == BACKENDS.keys() - {"rowwise"}, "rowwise stands in the folder of the reference"


def test_what_an_entry_loads_stands_in_its_load_module() -> None:
    for path in FOLDER.glob("*/load.py"):
        entry = BACKENDS[path.parent.name]
        assert any((entry.executable, entry.library, entry.find_op, entry.collectives)), path


def test_every_cost_says_why() -> None:
    assert all(one.cost > 0 and one.why for entry in BACKENDS.values() for one in entry.costs.values())
    assert all(entry.costs for entry in BACKENDS.values())


def test_the_command_names_the_choices_of_the_table() -> None:
    described = inspect.getdoc(compile_checkpoint)
    assert described is not None
    (text,) = re.findall(r"^backend\n(.*?)^\S", described, re.M | re.S)
    missing = {one for device in DEVICES for one in choices(device)} - set(re.findall(r"\w+", text))
    assert not missing


def test_choices() -> None:
    assert choices("cpu") == {
        "auto": ("inductor", "cpu", "reference", "rowwise"),
        "inductor": ("inductor", "cpu", "reference", "rowwise"),
        "onnx": ("onnx", "reference", "rowwise"),
        "reference": ("reference", "rowwise"),
    }
    assert choices("cuda") == {
        "auto": ("flashinfer", "triton", "cublas", "inductor", "reference", "rowwise"),
        "triton": ("triton", "reference", "rowwise"),
        "inductor": ("inductor", "triton", "reference", "rowwise"),
        "tensorrt": ("tensorrt", "triton", "reference", "rowwise"),
        "reference": ("reference", "rowwise"),
    }


def test_the_table_imports_no_backend() -> None:
    code = "import sys, ingot.backends.table; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert {name for name in found if name.startswith("ingot.backends.")} == {
        "ingot.backends.entry",
        "ingot.backends.table",
    }
    assert "torch" not in found


def test_what_each_backend_can_do() -> None:
    kinds = (FunctionBackend, LibraryBuilder, Compiler, RegionCompiler, Splitter, Tunable)
    able: dict[str, set[str]] = {}
    for name, entry in BACKENDS.items():
        for device in entry.emit:
            backend = backend_named(name, device)
            able[f"{name} {device}"] = {one.__name__ for one in kinds if isinstance(backend, one)}
    assert able == {
        "flashinfer cuda": {"Compiler"},
        "triton cuda": {"Compiler", "RegionCompiler", "Splitter", "Tunable"},
        "cublas cuda": {"FunctionBackend"},
        "inductor cpu": {"Compiler", "RegionCompiler"},
        "inductor cuda": {"Compiler", "RegionCompiler"},
        "onnx cpu": {"Compiler", "RegionCompiler"},
        "tensorrt cuda": {"Compiler", "RegionCompiler"},
        "cpu cpu": {"FunctionBackend", "LibraryBuilder"},
        "gloo cpu": {"FunctionBackend"},
        "nccl cuda": {"FunctionBackend"},
        "peer cuda": {"Compiler", "RegionCompiler"},
        "reference cpu": {"FunctionBackend"},
        "reference cuda": {"FunctionBackend"},
        "rowwise cpu": {"FunctionBackend"},
        "rowwise cuda": {"FunctionBackend"},
    }
