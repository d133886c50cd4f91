"""The options that quantize: each wrong one by name, and the pass that they add."""

from typing import Any

import pytest

from ingot.ir.errors import OptionError
from ingot.passes.pipeline import edit_pipeline
from ingot.passes.quantize import Quantize
from ingot.quantizing.options import QuantizeOptions


def read(scheme: str | None = "int8", **changes: Any) -> QuantizeOptions | None:
    usual: dict[str, Any] = {
        "method": "auto", "ignore": (), "overrides": {}, "head": False, "calibrate": None, "max_kl": None
    }  # fmt: skip
    return QuantizeOptions.read(scheme, **{**usual, **changes})


def test_nothing_is_quantized_by_default() -> None:
    assert read(None) is None


@pytest.mark.parametrize(
    ("changes", "method"),
    [({}, "rtn"), ({"calibrate": "builtin"}, "gptq"), ({"calibrate": "builtin", "method": "rtn"}, "rtn")],
)
def test_the_method(changes: dict[str, Any], method: str) -> None:
    found = read(**changes)
    assert found is not None and found.method == method


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "int5"}, "unknown weight format 'int5'"),
        ({"overrides": {"*": "int5"}}, "unknown weight format 'int5'"),
        ({"method": "gtpq"}, "unknown quantize_method 'gtpq'"),
        ({"method": "gptq"}, "quantize_method 'gptq' without a calibration text"),
        ({"scheme": "auto", "max_kl": 0.1}, "quantize 'auto' without a calibration text"),
        ({"scheme": "auto", "calibrate": "builtin"}, "quantize 'auto' without max_kl"),
        ({"max_kl": 0.1}, "max_kl with quantize 'int8'"),
        ({"ignore": ["a{b"]}, "the pattern 'a{b'"),
        ({"ignore": [""]}, "the pattern ''"),
        ({"overrides": {"a b": "int8"}}, "the pattern 'a b'"),
        ({"scheme": None, "head": True}, "quantize_head without quantize"),
        ({"scheme": None, "calibrate": "builtin"}, "calibrate without quantize"),
    ],
)
def test_wrong_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read(**changes)


def test_a_server_has_no_calibration() -> None:
    """`ingot serve` has no option for a text, so the error names the command that has one."""
    with pytest.raises(OptionError, match="calibrate with compile-model, and serve the artifact"):
        read("auto", max_kl=0.1)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "much"])
def test_a_bound_is_a_positive_number(value: object) -> None:
    with pytest.raises(OptionError, match="max_kl is"):
        read("auto", calibrate="builtin", max_kl=value)


def test_the_pass_has_these_options() -> None:
    overrides = {"layers.[01].*": "int8", "*.down": "int4_g64"}
    found = read("int4_g128", ignore=["lm_head", "*.o"], overrides=overrides, head=True)
    assert found is not None
    pipeline = edit_pipeline(f"default,{found.pass_text()}")
    (one,) = (one for phase in pipeline for one in phase.passes if isinstance(one, Quantize))
    assert one == Quantize("int4_g128", True, "lm_head|*.o", "layers.[01].*=int8|*.down=int4_g64")
    assert one.patterns() == ("lm_head", "*.o", *overrides)
