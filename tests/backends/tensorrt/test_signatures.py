"""The double of `tensorrt` has the signatures of the published bindings, and nothing else that the backend could call.

Where the bindings are installed, or unpacked in $INGOT_TENSORRT_BINDINGS, the table is compared with them."""

import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from published_tensorrt import read_bindings, read_table

TABLE = read_table()

pytestmark = pytest.mark.xdist_group("tensorrt")


@pytest.fixture(scope="module")
def double() -> dict[str, Any]:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package)
    from fake_tensorrt import module

    return {name: one for name, one in vars(module()).items() if inspect.isclass(one)}


def overload(text: str) -> list[tuple[str, bool]]:
    """The parameters of a signature's text in order: name, and whether it has a default."""
    given = text[: text.rindex(") ->")]
    return [(name, bool(default)) for name, default in re.findall(r"(?:\(|, )(\w+): [\w.]+( = )?", given)]


def test_the_text_of_a_signature_is_read() -> None:
    first, second = TABLE["signatures"]["ICudaEngine.create_execution_context"]
    assert overload(first) == [("self", False), ("strategy", True)]
    assert overload(second) == [("self", False), ("runtime_config", True)]
    assert overload(TABLE["signatures"]["IOptimizationProfile.set_shape"][0]) == [
        (name, False) for name in ("self", "input", "min", "opt", "max")
    ]


@pytest.mark.parametrize("name", TABLE["signatures"])
def test_a_method_of_the_double_has_a_published_signature(name: str, double: dict[str, Any]) -> None:
    owner, _, method = name.partition(".")
    parameters = inspect.signature(getattr(double[owner], method)).parameters.values()
    mine = [(one.name, one.default is not inspect.Parameter.empty) for one in parameters]
    assert mine in [overload(text) for text in TABLE["signatures"][name]]


def test_the_double_has_nothing_else(double: dict[str, Any]) -> None:
    known = {*TABLE["signatures"]} | {f"{name}.{one}" for name, many in TABLE["attributes"].items() for one in many}
    for owner, one in double.items():
        if owner in TABLE["enums"]:
            assert {member.name: int(member) for member in one} == TABLE["enums"][owner]
            continue
        mine = {f"{owner}.{name}" for name in vars(one) if not name.startswith("_")}
        assert mine <= known, mine - known


def bindings() -> Path | None:
    """The folder of the bindings, if they are here."""
    if folder := os.environ.get("INGOT_TENSORRT_BINDINGS"):
        return Path(folder)
    spec = find_spec("tensorrt_bindings")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


@pytest.mark.skipif(bindings() is None, reason="no package tensorrt-cu13-bindings")
def test_the_table_is_that_of_the_bindings() -> None:
    folder = bindings()
    assert folder is not None
    found = read_bindings(folder)
    assert re.fullmatch(r"11\.\d+\.\d+\.\d+", found.pop("version"))
    assert found == {name: TABLE[name] for name in found}
