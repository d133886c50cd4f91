"""Experts of quantized checkpoints: MXFP4 of GPT-OSS against transformers, int8, and experts of GPTQ and AWQ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Tensors, logical_of
from safetensors.torch import load_file, save_file
from tiny import TINY
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ingot import compile_model, open_artifact
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.formats import find_format
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.recipe import Recipe
from ingot.runtime.loading.loader import load_artifact

EXPERTS = "model.layers.0.mlp.experts"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def gpt_oss(experts: int = 3, rows: int = 10, groups: int = 2) -> Tensors:
    """Random bytes. Exponents stay where products are normal numbers of float32."""
    g = torch.Generator().manual_seed(0)
    found: Tensors = {"model.embed_tokens.weight": torch.ones(4, 8)}
    for name in ("gate_up_proj", "down_proj"):
        found[f"{EXPERTS}.{name}_blocks"] = torch.randint(0, 256, (experts, rows, groups, 16), generator=g).byte()
        found[f"{EXPERTS}.{name}_scales"] = torch.randint(1, 193, (experts, rows, groups), generator=g).byte()
        found[f"{EXPERTS}.{name}_bias"] = torch.ones(experts, rows)
    return found


def parts_of(recipe: Recipe, tensors: Tensors) -> dict[str, torch.Tensor]:
    format = find_format(str(recipe.attr("format")))
    made = (one.execute(tensors.__getitem__) for one in recipe.inputs)
    return dict(zip(format.parts, made, strict=True))


def test_mxfp4_bit_by_bit() -> None:
    tensors = gpt_oss()
    logical = logical_of(MXFP4, tensors)
    names = {f"{EXPERTS}.{index}.{name}.weight" for index in range(3) for name in ("gate_up_proj", "down_proj")}
    assert set(logical.recipes) == names
    biases = {f"{EXPERTS}.{name}_bias" for name in ("gate_up_proj", "down_proj")}
    assert set(logical.tensors) == names | biases | {"model.embed_tokens.weight"}
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (tensors[f"{EXPERTS}.{name}_{part}"] for part in ("blocks", "scales"))
        meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inputs, outputs]
        for index in range(3):
            full = f"{EXPERTS}.{index}.{name}.weight"
            assert tuple(logical.tensors[full].shape) == (10, 64)
            recipe = logical.recipes[full]
            assert recipe.attr("format") == "mxfp4"
            assert torch.equal(recipe.execute(tensors.__getitem__), meant[index].T)
            parts = parts_of(recipe, tensors)
            assert torch.equal(parts["weight"], blocks[index].flatten(1)), "no byte is changed"
            assert torch.equal(parts["scales"].view(torch.uint8), scales[index])


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", None, "lacks .*gate_up_proj_scales"),
        ("scales", torch.ones(3, 10, 3, dtype=torch.uint8), "gate_up_proj_scales is uint8"),
        ("blocks", torch.ones(3, 10, 32, dtype=torch.uint8), "gate_up_proj_blocks is \\[3, 10, 32\\]"),
        ("blocks", torch.ones(3, 10, 2, 8, dtype=torch.uint8), "gate_up_proj_blocks is \\[3, 10, 2, 8\\]"),
        ("blocks", torch.ones(3, 10, 2, 16), "gate_up_proj_blocks is float32"),
    ],
)
def test_mxfp4_tensors(part: str, value: torch.Tensor | None, message: str) -> None:
    tensors = gpt_oss()
    name = f"{EXPERTS}.gate_up_proj_{part}"
    tensors = {**tensors, name: value} if value is not None else {key: tensors[key] for key in tensors if key != name}
    with pytest.raises(CheckpointError, match=message):
        logical_of(MXFP4, tensors)


def test_a_scale_of_nan() -> None:
    tensors = gpt_oss()
    tensors[f"{EXPERTS}.down_proj_scales"][1, 2, 0] = 255
    logical = logical_of(MXFP4, tensors)
    logical.recipes[f"{EXPERTS}.0.down_proj.weight"].execute(tensors.__getitem__)
    with pytest.raises(CheckpointError, match="1 of 20 scales are NaN or infinite"):
        logical.recipes[f"{EXPERTS}.1.down_proj.weight"].execute(tensors.__getitem__)


def test_experts_that_are_excluded() -> None:
    with pytest.raises(CheckpointError, match="is quantized, but the quantization_config excludes it"):
        logical_of({**MXFP4, "modules_to_not_convert": ["experts"]}, gpt_oss())
    with pytest.raises(ConfigError, match="not understood: swizzle"):
        logical_of({**MXFP4, "swizzle": 1}, gpt_oss())


def test_experts_int8() -> None:
    """A scale for each row, the largest number over 127, rounded to nearest; all other weights stay floats."""
    g = torch.Generator().manual_seed(0)
    names = [f"{EXPERTS}.{index}.{part}.weight" for index in range(2) for part in ("w1", "w2", "w3")]
    tensors = {name: torch.randn(6, 8, generator=g) for name in names}
    tensors |= {"model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8), "model.norm.weight": torch.ones(8)}
    logical = logical_of({"quant_method": "experts_int8"}, tensors)
    assert set(logical.recipes) == set(names) and set(logical.tensors) == set(tensors)
    for name in names:
        scales = tensors[name].abs().amax(1, keepdim=True) / 127
        codes = (tensors[name] / scales).round().clamp(-127, 127)
        parts = parts_of(logical.recipes[name], tensors)
        assert torch.equal(parts["weight"], codes.to(torch.int8)) and torch.equal(parts["scales"], scales)
        assert torch.equal(logical.recipes[name].execute(tensors.__getitem__), codes * scales)
    with pytest.raises(CheckpointError, match="the checkpoint has no experts"):
        logical_of({"quant_method": "experts_int8"}, {"model.norm.weight": torch.ones(8)})


def words(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight codes of four bits in a word along an axis, the first in the lowest bits."""
    runs = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    joined = (runs << (4 * torch.arange(8))).sum(-1)
    return joined.to(torch.uint32).view(torch.int32).movedim(-1, dim).contiguous()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_of_other_methods(method: str) -> None:
    """What vLLM calls MoE-WNA16: each expert is a module of GPTQ or AWQ."""
    g = torch.Generator().manual_seed(0)
    rows, columns, size = 16, 64, 32
    config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": size}
    tensors: Tensors = {}
    meant = {}
    for module in (f"{EXPERTS}.{index}.{part}" for index in range(2) for part in ("gate_proj", "up_proj", "down_proj")):
        codes = torch.randint(0, 16, (rows, columns), generator=g)
        zeros = torch.randint(1, 16, (rows, columns // size), generator=g)
        scales = (torch.rand(rows, columns // size, generator=g) + 0.5).half()
        each = [one.repeat_interleave(size, 1) for one in (zeros, scales.float())]
        meant[f"{module}.weight"] = (codes - each[0]) * each[1]
        tensors[f"{module}.scales"] = scales.T.contiguous()
        if method == "gptq":  # zero points are stored minus one
            tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"] = words(codes.T, 0), words(zeros.T - 1, 1)
        else:
            stored_at = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of each nibble
            for part, one in (("qweight", codes.T), ("qzeros", zeros.T)):
                tensors[f"{module}.{part}"] = words(one.unflatten(1, (-1, 8))[..., stored_at].flatten(1), 1)
    logical = logical_of(config, tensors)
    assert set(logical.recipes) == set(meant) == set(logical.tensors)
    for name, wanted in meant.items():
        assert logical.recipes[name].attr("format") == "u4/1x32:f16:zeros/low_first"
        assert torch.equal(logical.recipes[name].execute(tensors.__getitem__), wanted.float())


def test_gpt_oss_with_mxfp4_experts_computes_what_its_floats_compute(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 3}
    floats = replace(TINY["gpt_oss-yarn"], config={**TINY["gpt_oss-yarn"].config, **sizes})
    quantized = floats.write(tmp_path / "mxfp4", quantization_config=MXFP4)
    tensors, g = load_file(quantized / "model.safetensors"), torch.Generator().manual_seed(0)
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=g).byte()
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), generator=g).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, quantized / "model.safetensors")
    save_file(meant, floats.write(tmp_path / "floats") / "model.safetensors")
    found = []
    for folder in (quantized, tmp_path / "floats"):
        artifact = tmp_path / f"{folder.name}.ingot"
        compile_model(folder, artifact, backend="reference", max_seq_len=64, max_batch=2, max_tokens=64)
        loaded = load_artifact(artifact, num_pages=8)
        if folder == quantized:
            assert open_artifact(artifact).trace["adopt-quantized"].matches == 2

        def run(inputs: Any, loaded: Any = loaded) -> dict[str, torch.Tensor]:
            outputs: dict[str, torch.Tensor] = loaded.executor.launch(inputs).outputs
            return outputs

        found.append(torch.cat(teacher_forced(loaded.executor.inputs, run, [[5, 7, 9, 11, 2, 3]], pages=8)))
    assert torch.equal(*found)
