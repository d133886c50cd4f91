"""Quantized checkpoints from files to tokens: compiled, checked, served, bisected, and divided over a mesh."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    LIMIT_OPTIONS,
    PROMPTS,
    Tensors,
    Write,
    Written,
    float_logits,
    formats_of,
    not_the_head,
    write_quantized,
)
from safetensors.torch import save_file
from staged import LIMITS, logits_of, staged

from ingot import LLM, SamplingParams, bisect, compile_model, open_artifact
from ingot.cli.views.weights import print_weights
from ingot.debug.bisect.verdict import Kind
from ingot.ir import recipe
from ingot.ir.errors import OptionError
from ingot.ir.numerics.tolerances import compare
from ingot.ir.recipe import STEPS, dequantize, source
from ingot.passes.pipeline import edit_pipeline, pipeline_for
from ingot.rounding.tensors import rows_of

pytestmark = [pytest.mark.xdist_group("quantized checkpoints"), pytest.mark.one_in_file(3)]
UP = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
ORDER = torch.randperm(256, generator=torch.Generator().manual_seed(0))


def four_bits(order: torch.Tensor) -> Write:
    """GPTQ of version 1 with groups of 32."""

    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        groups = (torch.arange(columns) // 32)[order[order < columns]]
        draw = torch.Generator().manual_seed(len(module))
        scales = (weight.abs().max() / 7 * (0.5 + torch.rand(columns // 32, len(weight), generator=draw))).half()
        zeros = torch.randint(1, 16, scales.shape, generator=draw)
        q = ((weight.T / scales.float()[groups]).round().long() + zeros[groups]).clamp(0, 15)

        def words(codes: torch.Tensor) -> torch.Tensor:
            many = codes.unflatten(0, (-1, 8))
            return torch.stack([many[:, i] << (4 * i) for i in range(8)]).sum(0).to(torch.uint32).view(torch.int32)

        parts = {"qweight": words(q), "qzeros": words((zeros - 1).T).T, "scales": scales, "g_idx": groups.int()}
        return parts, ((q - zeros[groups]).float() * scales.float()[groups]).T

    return write


def eight_bits(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("stored") / "m"
    return write_quantized(folder, GPTQ, not_the_head(four_bits(ORDER)), torch_dtype="bfloat16")


@pytest.fixture(scope="module")
def artifact(written: Written) -> Path:
    compile_model(written.folder, written.folder.parent / "m.ingot", check_numerics=True, **LIMIT_OPTIONS)
    return written.folder.parent / "m.ingot"


def test_generation_agrees_with_a_float_model_of_the_weights(written: Written, artifact: Path) -> None:
    floats = written.folder.parent / "floats.ingot"
    float_logits(written)  # writes the float model
    compile_model(written.folder.parent / "m-floats", floats, dtype="float32", **LIMIT_OPTIONS)
    exact = written.folder.parent / "exact.ingot"
    compile_model(written.folder, exact, dtype="float32", **LIMIT_OPTIONS)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    tokens = [[one.outputs[0].token_ids for one in LLM(path).generate(prompts, greedy)] for path in (exact, floats)]
    assert tokens[0] == tokens[1] and all(len(one) == 12 for one in tokens[0])


def test_the_artifact_shows_formats_and_recipes(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_artifact(artifact)
    record = opened.trace["adopt-quantized"]
    assert record.matches == 7 and record.op_count_diff == {"ingot.linear": -7, "ingot.quant_linear": 7}
    print_weights(opened)
    lines = capsys.readouterr().out
    assert "layers.0.attention.q_k_v.qweight" in lines and "layers.0.mlp.gate_up.zeros" in lines
    assert 'group_order(source(name="model.layers.0.mlp.down_proj.g_idx"), size=32)' in lines


def test_nothing_is_found_to_blame(artifact: Path) -> None:
    assert not bisect(artifact)


def _wrong(step: str) -> Callable[[list[torch.Tensor], Mapping[str, Any]], Any]:
    """A planted fault in a step of recipes: swapped nibbles, a zero point that is off by one, or doubled scales."""

    def run(args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
        if step == "shift":
            return STEPS[step](args, {**attrs, "add": int(attrs["add"]) + 1})
        found = STEPS[step](args, attrs)
        return ((found >> 4) | (found << 4)) if step == "pack" else found * 2

    return run


@pytest.mark.parametrize("step", ["pack", "shift", "check_scales"])
def test_a_wrong_nibble_order_zero_point_or_scale_is_named(
    step: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "STEPS", {**STEPS, step: _wrong(step)})
    verdict = bisect(artifact)
    assert (verdict.kind, verdict.blamed) == (Kind.RECIPE, step), verdict
    assert f"the step {step}(" in verdict.found and verdict.node


def test_without_the_pass_weights_are_dequantized(written: Written) -> None:
    request = written.request(passes="default,-adopt-quantized", dtype="float32")
    program = staged(request.trace(), request.pipeline(), LIMITS)[1].fused
    assert not formats_of(program)
    found = logits_of(program, request.checkpoint.read, PROMPTS).exact
    assert compare(found, float_logits(written), torch.float32, factor=20) is None


def test_the_pass_cannot_be_left_out_of_a_float_model(written: Written) -> None:
    float_logits(written)  # writes the float model
    request = replace(written, folder=written.folder.parent / "m-floats").request(passes="default,-adopt-quantized")
    with pytest.raises(OptionError, match="pass 'adopt-quantized' does not run by default"):
        request.pipeline()


def test_adapters_are_merged_or_refused(written: Written, tmp_path: Path) -> None:
    """A merged adapter changes the weight, so that one is dequantized."""
    with pytest.raises(OptionError, match="max_loras with a quantized checkpoint"):
        written.request(max_loras=2)
    module, draw = "model.layers.0.mlp.up_proj", torch.Generator().manual_seed(0)
    factors = {"A": torch.randn(4, 128, generator=draw), "B": torch.randn(256, 4, generator=draw) / 8}
    names = {f"base_model.model.{module}.lora_{part}.weight": value for part, value in factors.items()}
    save_file(names, tmp_path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    request = written.request(adapter=tmp_path, dtype="float32")
    program = staged(request.trace(), request.pipeline(), LIMITS)[1].fused
    made = program.params["layers.0.mlp.up.weight"].recipe.execute(request.checkpoint.read)
    assert torch.allclose(made, written.floats[f"{module}.weight"] + factors["B"] @ factors["A"], atol=1e-5)
    assert "layers.0.mlp.gate.qweight" in program.params


@pytest.mark.parametrize("blocks", [False, True], ids=["act-order", "blocks"])
def test_some_rows_of_a_stored_weight(written: Written, blocks: bool) -> None:
    """The check of fusions reads a few rows of each weight."""
    recipe_, read = written.request().checkpoint.logical.recipes[f"{UP}.weight"], written.request().checkpoint.read
    if blocks:
        parts = {"weight": source("w"), "scales": source("s")}
        recipe_ = dequantize(parts, "fp8_block128")
        tensors = {"w": torch.randn(200, 256).to(torch.float8_e4m3fn), "s": torch.rand(2, 2)}
        read = tensors.__getitem__
    rows = torch.tensor([130, 0, 127, 199])
    assert torch.equal(rows_of(recipe_, rows, read), recipe_.execute(read)[rows])


def test_deterministic_mode(tmp_path: Path) -> None:
    """A token's result depends on no other token of the step, also where activations are rounded."""
    stored = write_quantized(tmp_path / "m", FP8, not_the_head(eight_bits))
    compile_model(stored.folder, tmp_path / "m.ingot", deterministic=True, **LIMIT_OPTIONS)
    llm, greedy = LLM(tmp_path / "m.ingot"), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    alone = [llm.generate([one], greedy)[0].outputs[0] for one in prompts]
    together = [one.outputs[0] for one in llm.generate(prompts, greedy)]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    assert [one.cumulative_logprob for one in alone] == [one.cumulative_logprob for one in together]


MESH = {"tp": 2}


@pytest.mark.parametrize(
    ("described", "write"),
    [
        ({**GPTQ, "desc_act": False}, four_bits(torch.arange(256))),
        (GPTQ, four_bits(ORDER)),
        (FP8, eight_bits),
    ],
    ids=["groups", "act-order", "fp8"],
)
def test_a_mesh_divides_the_parts(tmp_path: Path, described: dict[str, Any], write: Write) -> None:
    """Whole groups stay on a rank. Weights in another order, or with a scale for a token, are split by rows only."""
    request = write_quantized(tmp_path / "m", described, not_the_head(write)).request()
    read, passes = request.checkpoint.read, "default,adopt-quantized"
    alone = logits_of(staged(request.trace(), request.pipeline())[1].fused, read, PROMPTS)
    pipeline = edit_pipeline(passes, pipeline_for(MESH))
    split = staged(request.trace(), pipeline, mesh=MESH)[1].fused
    assert compare(logits_of(split, read, PROMPTS).exact, alone.exact, torch.float64, factor=100) is None
    down = split.params["layers.0.mlp.down.qweight"]
    by_columns = described.get("desc_act") is False
    assert [place.dim for place in down.placement] == ([1] if by_columns else [])
    rows = [spec.placement for name, spec in split.params.items() if ".q" in name and "attention" in name]
    assert any(place and place[0].dim == 0 for place in rows)
