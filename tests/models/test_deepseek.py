"""DeepSeek: published sizes, YaRN's temperature, layers that are not used, and weights in FP8 as published."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LIMIT_OPTIONS, adopted, formats_of
from quantized_files import Written as QuantizedFiles
from safetensors.torch import load_file, save_file
from specs import specs
from tiny import TINY

from ingot.compile.request import Request
from ingot.ir import ops
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.types import TensorType
from ingot.models.architectures import read_spec
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec
from ingot.models.blocks.indexer import IndexerSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.norm import NormSpec

PUBLISHED = json.loads((Path(__file__).parents[1] / "goldens" / "published_configs.json").read_text())


def _read(name: str, **changes: Any) -> Any:
    config = PUBLISHED.get(name) or TINY[name].config
    return read_spec({key: value for key, value in {**config, **changes}.items() if value is not ...})


def _attention(name: str, **changes: Any) -> LatentAttentionSpec:
    return next(specs(_read(name, **changes).dims, LatentAttentionSpec))


@pytest.mark.parametrize(
    ("name", "layers", "dense", "q_rank", "mscale", "router"),
    [
        ("DeepSeek-V2-Lite", 27, 1, None, 0.707, RouterSpec(6, wide=True)),
        (
            "DeepSeek-V2",
            60,
            1,
            1536,
            0.707,
            RouterSpec(6, groups=8, kept_groups=3, group_best=1, scale=16.0, wide=True),
        ),
        (
            "DeepSeek-V3",
            61,
            3,
            1536,
            1.0,
            RouterSpec(
                8,
                scores="sigmoid",
                renormalize=True,
                least_sum=1e-20,
                choice_bias="gate.e_score_correction_bias",
                groups=8,
                kept_groups=4,
                scale=2.5,
                wide=True,
            ),
        ),
    ],
)
def test_published_sizes(
    name: str, layers: int, dense: int, q_rank: int | None, mscale: float, router: RouterSpec
) -> None:
    spec = _read(name)
    attention = _attention(name)
    assert spec.max_position == 163_840 and len(spec.dims.layers) == layers
    assert len([*specs(spec.dims, ExpertsSpec)]) == layers - dense
    assert next(specs(spec.dims, RouterSpec)) == router
    assert (attention.inner, attention.rotated, attention.value_width, attention.rank) == (128, 64, 128, 512)
    assert attention.q_rank == q_rank and attention.rotary.interleaved
    # YaRN's factor of scores, and none on cosines and sines: both mscales are equal.
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2)
    assert spec.dims.ropes[0].number("attention_factor") == 1.0 and spec.dims.ropes[0].rotary_dim == 64
    # 576 numbers per token and layer: 1152 bytes in bfloat16.
    form = CacheForm(attention.rank + attention.rotated, attention.rank, shared=True)
    assert form.row * form.parts == 576


def test_published_sizes_of_the_indexer() -> None:
    """DeepSeek-V3.2 has the sizes of V3, and the fields of its indexer, which are transformers' defaults too."""
    of_v32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    given = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    attention = _attention("DeepSeek-V3", **of_v32, **given)
    indexer = attention.indexer
    assert indexer == IndexerSpec(64, 128, 2048) == _attention("DeepSeek-V3", **of_v32).indexer
    assert indexer.k_norm == NormSpec(1e-6, kind="layer", wide=True, bias=True, stored="k_norm")
    assert attention.rotary.interleaved and not indexer.rotary.interleaved
    assert replace(attention, indexer=None) == _attention("DeepSeek-V3")
    assert len([*specs(_read("DeepSeek-V3", **of_v32).dims, IndexerSpec)]) == 61


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("index_head_dim", 7, "at least 8, the elements that 'qk_rope_head_dim' rotates"),
        ("rope_interleave", False, "True"),
        ("layer_types", ["indexed_attention", "full_attention", "indexed_attention"], "indexed_attention"),
    ],
)
def test_what_an_indexer_needs(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"'{field}'") as caught:
        _read("deepseek_v32-few", **{field: value})
    assert expected in caught.value.expected


def test_the_latent_of_q_is_missing_or_null() -> None:
    """Null is a model without it. A missing field is transformers' default."""
    assert _attention("deepseek_v3-groups", q_lora_rank=None).q_rank is None
    assert _attention("deepseek_v3-groups", q_lora_rank=...).q_rank == 1536


def test_groups_count_only_where_they_are_asked_for() -> None:
    """With the choice "greedy", all groups are open, whatever their number."""
    of = _read("deepseek_v2-groups", topk_method="greedy").dims
    assert next(specs(of, RouterSpec)).groups == 1
    with pytest.raises(ConfigError, match="field 'norm_topk_prob' is True"):
        _read("deepseek_v2-groups", norm_topk_prob=True)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("table", "factor"),
    [
        ({**YARN, "mscale_all_dim": 1.5}, 0.15 * math.log(8) + 1),
        (YARN, 1.0),
        ({**YARN, "mscale_all_dim": 0}, 1.0),
        ({**YARN, "mscale": 1.5}, 1.0),
        ({**YARN, "factor": 0.5, "mscale_all_dim": 1.5}, 1.0),
        ({"rope_type": "linear", "factor": 8.0, "mscale_all_dim": 1.5}, 0.15 * math.log(8) + 1),
        ({"rope_type": "default", "factor": 8.0, "mscale_all_dim": 1.5}, 1.0),
    ],
)
def test_the_temperature_of_scores(table: dict[str, Any], factor: float) -> None:
    """As transformers' `yarn_apply_mscale` has it, whatever the type of table but the default one."""
    found = _attention("deepseek_v3-halves", rope_scaling=table)
    assert found.scale == pytest.approx(18**-0.5 * factor**2)


def test_a_temperature_without_a_factor_is_refused() -> None:
    table = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "mscale_all_dim": 1.0}
    table |= {"original_max_position_embeddings": 40}
    with pytest.raises(ConfigError, match="'rope_scaling'") as caught:
        _read("deepseek_v3-halves", rope_scaling=table)
    assert "longrope, which has no factor" in caught.value.expected


def _with_a_layer(folder: Path, index: int) -> Path:
    """The tensors of layer 1 also as layer `index`, and one that only layers of multi-token prediction have."""
    tensors = load_file(folder / "model.safetensors")
    more = {name.replace("layers.1.", f"layers.{index}."): one for name, one in tensors.items() if "layers.1." in name}
    more[f"model.layers.{index}.eh_proj.weight"] = torch.ones(2, 2)
    save_file({**tensors, **{name: one.clone() for name, one in more.items()}}, folder / "model.safetensors")
    return folder


def test_layers_that_predict_further_tokens_are_not_used(tmp_path: Path) -> None:
    """As many as the configuration has, by their numbers. Any other layer is an error that names it."""
    for number, (index, fields) in enumerate([(3, {}), (4, {"num_nextn_predict_layers": 2})]):
        folder = _with_a_layer(TINY["deepseek_v3-groups"].write(tmp_path / str(number), **fields), index)
        assert "main" in Request.read(folder, **LIMIT_OPTIONS).trace().entries
    refused = [("deepseek_v3-groups", 4, {}), ("deepseek_v3-groups", 3, {"num_nextn_predict_layers": 0})]
    for number, (name, index, fields) in enumerate([*refused, ("deepseek_v2-lite", 3, {})], 2):
        folder = _with_a_layer(TINY[name].write(tmp_path / str(number), **fields), index)
        with pytest.raises(CheckpointError, match=rf"model\.layers\.{index}\."):
            Request.read(folder, **LIMIT_OPTIONS).trace()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("kv_b_proj.weight", lambda one: one[:-1], r"kv_b_proj\.weight: expected \[132, 26\], found \[131, 26\]"),
        ("kv_b_proj.weight", lambda one: one[:, 1:], r"kv_b_proj\.weight: expected \[132, 26\], found \[132, 25\]"),
        ("kv_a_proj_with_mqa.weight", lambda one: one[1:], r"with_mqa\.weight: expected \[34, 66\], found \[33, 66\]"),
        ("kv_a_layernorm.weight", None, r"missing.*kv_a_layernorm\.weight"),
        ("q_b_proj.weight", None, r"missing.*q_b_proj\.weight"),
    ],
)
def test_tensors_of_latents_are_checked(
    name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, said: str, tmp_path: Path
) -> None:
    folder = TINY["deepseek_v3-groups"].write(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    full = f"model.layers.0.self_attn.{name}"
    stored = tensors.pop(full)
    if change is not None:
        tensors[full] = change(stored).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"(?s){said}"):
        Request.read(folder, **LIMIT_OPTIONS).trace()


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


# Inputs of linears in whole blocks.
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 32, "q_lora_rank": 128}
SIZES |= {"intermediate_size": 128, "moe_intermediate_size": 64}


def _fp8(folder: Path, name: str = "deepseek_v3-groups") -> QuantizedFiles:
    """A tiny DeepSeek-V3 whose linears are stored as in the published checkpoint: routers and the head are floats.

    So are an indexer's weights of heads.
    """
    TINY[name].write(folder, **SIZES, quantization_config=FP8)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    meant, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        linear = name.endswith(("_proj.weight", "wq_b.weight", "wk.weight")) or "kv_a_proj" in name
        if not linear or name.endswith("weights_proj.weight"):
            stored[name] = tensor
            continue
        scales = torch.rand([-(-size // 128) for size in tensor.shape], generator=generator) * 0.01 + 0.005
        by_element = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor / by_element).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = stored[name].float() * by_element
    save_file(stored, folder / "model.safetensors")
    return QuantizedFiles(folder, meant)


def test_fp8_blocks(tmp_path: Path) -> None:
    """Linears keep their blocks. The matrices of keys and values of a latent are dequantized, as experts are."""
    written = _fp8(tmp_path / "m")
    program, _ = adopted(written)
    assert formats_of(program) == {"fp8_block128"}
    read = written.request().checkpoint.read
    rows = written.floats["model.layers.1.self_attn.kv_b_proj.weight"].unflatten(0, (4, 42))
    for name, wanted in (("k_up", rows[:, :10]), ("v_up", rows[:, 10:])):
        found = program.params[f"layers.1.attention.{name}"].recipe.execute(read)
        assert torch.equal(found, wanted.flatten(0, 1))
    experts = program.params["layers.1.mlp.down"].recipe.execute(read)
    assert torch.equal(experts[3], written.floats["model.layers.1.mlp.experts.3.down_proj.weight"])


def test_fp8_blocks_of_an_indexer(tmp_path: Path) -> None:
    """Its linears keep their blocks, and its weights of heads are float32."""
    program, _ = adopted(_fp8(tmp_path / "m", "deepseek_v32-few"))
    linears = {str(one.args[1].target): one for one in program.calls(ops.quant_linear.overload)}
    for name in ("q", "k"):
        assert linears[f"layers.0.attention.indexer.{name}.qweight"].kwargs["format"] == "fp8_block128"
    weights = program.params["layers.0.attention.indexer.weights.weight"].type
    assert weights == TensorType(torch.float32, (14, 128))
