"""The library of C++ kernels says which interface it has, and loading refuses another one."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.backends.cpu import interface
from ingot.backends.cpu.calls.attention import attention_ops
from ingot.backends.cpu.calls.dense import dense_ops
from ingot.backends.cpu.calls.kernels import INT, POINTER, REAL, Kernels
from ingot.backends.cpu.calls.quant import quant_ops
from ingot.backends.cpu.calls.rope import rope_ops
from ingot.backends.cpu.calls.step import step_ops
from ingot.backends.cpu.interface import declarations, interface_digest
from ingot.backends.cpu.load import load_library
from ingot.backends.toolchain import compiler_path
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import ArtifactError
from ingot.runtime.loading.load_context import on_one_device

pytestmark = pytest.mark.xdist_group("cpu-kernels")


def build(folder: Path, source: str) -> Executable:
    """Build a library with the name of the kernels' one."""
    (folder / "kernels.cpp").write_text(source)
    command = [compiler_path(), "-shared", "-fPIC", "-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")]
    subprocess.run(command, check=True)
    return Executable(id="x", backend="cpu", inputs=(), outputs=(), files=("kernels.so",))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('extern "C" void set_threads(long) {}', "with an interface that it does not name"),
        (f'extern "C" {{ extern const char kernel_interface[]; const char kernel_interface[] = "{"0f" * 32}"; }}',
         "with the interface 0f0f0f0f0f0f"),
    ],
    ids=["older", "other"],
)  # fmt: skip
def test_a_library_with_another_interface_is_refused(tmp_path: Path, source: str, named: str) -> None:
    executable = build(tmp_path, source)
    with pytest.raises(ArtifactError, match=named) as caught:
        load_library(executable, tmp_path, on_one_device("cpu"))
    assert caught.value.where == str(tmp_path / "kernels.so")
    assert caught.value.expected == f"the interface {interface_digest()[:12]}"
    assert "compile the model again" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "change", "differs"),
    [
        ("step.cpp", ("const int32_t *rejected,", ""), True),
        ("step.cpp", ("int32_t *rows, const int32_t *kv_lens", "int32_t *kv_lens, const int32_t *rows"), True),
        ("quant.h", ("I8, U8,", "U8, I8,"), True),
        ("step.cpp", ("// padding", "// padding, again"), False),
    ],
    ids=["fewer arguments", "other order", "other numbers", "a comment"],
)  # fmt: skip
def test_the_digest_changes_with_the_declarations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: tuple[str, str], differs: bool
) -> None:
    before = interface_digest()
    shutil.copytree(interface.KERNELS, tmp_path / "kernels")
    text = (tmp_path / "kernels" / file).read_text()
    assert change[0] in text
    (tmp_path / "kernels" / file).write_text(text.replace(*change))
    monkeypatch.setattr(interface, "KERNELS", tmp_path / "kernels")
    assert (interface_digest() != before) is differs


class Recorded(Kernels):
    """Kernels without a library. `called` has the argument types of each function."""

    def __init__(self) -> None:
        self.called: dict[str, tuple[Any, ...]] = {}

    def one(self, name: str, *types: Any) -> Callable[..., None]:
        self.called[name] = types
        return lambda *args: None


def test_calls_pass_the_arguments_that_are_declared() -> None:
    recorded = Recorded()
    for ops in (attention_ops, dense_ops, quant_ops, rope_ops, step_ops):
        ops(recorded)
    recorded.one("set_threads", INT)
    declared: dict[str, list[tuple[Any, ...]]] = {}
    for text in declarations():
        if found := re.fullmatch(r'extern "C" void ([\w#]+)\((.*)\)', text):
            pattern = r"\w+" if found[1] == "NAME" else re.sub(r"##\w+?(?=##|_|$)", r"\\w+", found[1])
            types = tuple(POINTER if "*" in one else REAL if "double" in one else INT for one in found[2].split(","))
            declared.setdefault(pattern, []).append(types)
    assert len(declared) >= 14
    for name, given in recorded.called.items():
        fitting = [types for pattern, found in declared.items() if re.fullmatch(pattern, name) for types in found]
        assert given in fitting, f"{name} is called with {[ctypes.sizeof(one) for one in given]}"
