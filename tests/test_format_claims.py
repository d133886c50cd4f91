"""Formats that a target does not run: the error names targets and the nearest format, before anything is traced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import MODEL, Tensors, Written, write_quantized
from tiny import TINY

from ingot import compile_model
from ingot.compile.competing import competing
from ingot.compile.format_claims import nearest, targets
from ingot.compile.request import Request
from ingot.ir.errors import TargetError
from ingot.ir.formats import FORMATS, find_format
from ingot.ir.machine.target import Target

LIMITS = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 64}
FROM_89 = ["cpu", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("floats") / "m")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Written:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().amax() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return write_quantized(tmp_path_factory.mktemp("fp8") / "m", config, write)


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("format", "near"),
    [
        ("fp8", "int8_w8a8"),
        ("fp8_block128", "int8_w8a8"),
        ("mxfp8", "int8_w8a8"),
        ("i4/1x128:f32/low_first/x=f8e4m3:*", "int4_g128"),
    ],
)
def test_rounding_needs_instructions(floats: Path, target: str, deterministic: bool, format: str, near: str) -> None:
    with pytest.raises(
        TargetError, match=f"the format '.*' does not run on {target}: .*needs sm_89 or newer"
    ) as caught:
        Request.read(floats, target=target, quantize=format, deterministic=deterministic, **LIMITS)
    assert caught.value.where == "quantize"
    assert caught.value.expected == f"a target that runs it: {', '.join(FROM_89)}"
    assert caught.value.hint.startswith(f"the nearest format that runs on {target} is --quantize {near};")
    with pytest.raises(TargetError, match="does not run"):
        Request.read(floats, target=target, quantize="int8", quantize_overrides={"*.down": format}, **LIMITS)
    with pytest.raises(TargetError, match="does not run"):
        Request.read(floats, target=target, passes=f'default,quantize{{format="{format}"}}', **LIMITS)
    Request.read(floats, target=target, quantize=format, backend="reference", **LIMITS)


def test_checkpoint(fp8: Written) -> None:
    """A quantized checkpoint is refused like the option, unless its weights are dequantized."""
    with pytest.raises(TargetError, match=r"the format 'fp8' does not run on sm_80: .*needs sm_89") as caught:
        fp8.request(**LIMITS, target="sm_80", backend="auto")
    assert caught.value.where == str(fp8.folder)
    assert "--quantize int8_w8a8" in caught.value.hint and '--passes "default,-adopt-quantized"' in caught.value.hint
    for options in ({"target": "sm_90"}, {"target": "sm_80", "passes": "default,-adopt-quantized"}):
        fp8.request(**LIMITS, backend="auto", **options)


def test_every_format_runs_where_its_targets_say(floats: Path) -> None:
    for name in FORMATS:
        rounds = FORMATS[name].activations
        converts = rounds is not None and rounds.element == "f8e4m3"
        expected = FROM_89 if converts else ["cpu", "sm_80", "sm_86", *FROM_89[1:]]
        assert targets(find_format(name), deterministic=False) == expected, name


def test_nearest_is_the_format_itself_where_it_has_kernels() -> None:
    target = Target.named("sm_90")
    backends = competing("auto", target)
    for name in ("int8", "fp8", "int4_g128", "int8_w8a8", "int4_g32_asym", "mxfp4", "nvfp4"):
        assert nearest(find_format(name), target, backends, deterministic=False) == name
    # Without a kernel, a format that has one comes before it.
    assert nearest(find_format("nf4"), target, backends, deterministic=False) == "int4_g64"


def test_weights_without_a_kernel_run_slowly() -> None:
    """Triton converts no f8e4m3 on sm_80, and says so; Inductor or the reference computes with such weights."""
    target = Target.named("sm_80")
    format = find_format("f8e4m3/1x*:f32")
    assert nearest(format, target, competing("auto", target), deterministic=False) == "int8"
    assert "sm_80" in targets(format, deterministic=False)


def test_rotations_have_no_kernel() -> None:
    """Triton refuses them by name, so a format without them is nearer to the kernels."""
    target = Target.named("sm_90")
    for name in ("i8/1x*:f32/rotated_in=16", "i8/1x*:f32/rotated_out=16"):
        assert nearest(find_format(name), target, competing("auto", target), deterministic=False) == "int8"
        assert "sm_90" in targets(find_format(name), deterministic=False)


def test_experts_without_a_kernel(tmp_path: Path) -> None:
    """References would read the routing on the host in each step, so a GPU has kernels for experts, or an error."""
    tiny = TINY["qwen3_moe-plain"]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    folder = replace(tiny, config={**tiny.config, **sizes}).write(tmp_path / "m")
    options: dict[str, Any] = {**LIMITS, "quantize_ignore": ["*.self_attn.*"], "dtype": "bfloat16"}
    text = "experts in format nf4 do not run on sm_90: .*no kernel for elements nf4"
    with pytest.raises(TargetError, match=text) as one:
        compile_model(folder, tmp_path / "a.ingot", target="sm_90", quantize="nf4", **options)
    assert "layer 0" in one.value.where and "--quantize-ignore" in one.value.hint and one.value.exit_code == 2
    with pytest.raises(TargetError, match=r"the format 'fp8' does not run on sm_80: .*needs sm_89 or newer"):
        compile_model(folder, tmp_path / "a.ingot", target="sm_80", quantize="fp8", **options)
