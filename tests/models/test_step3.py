"""Step3: the fields of published configs, defaults of missing fields, and names of tensors in saved checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from specs import specs
from tiny import TINY

from ingot.compile.request import Request
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.models.architectures import ignored_fields, read_spec
from ingot.models.blocks.attention import AttentionSpec, QLatentSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import ExpertsSpec
from ingot.models.config import RopeSpec

# The values of the published configuration class. Layers with experts are a text, which the published code reads.
TEXT: dict[str, Any] = {
    "architectures": ["Step3TextForCausalLM"],
    "model_type": "step3_text",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_attention_groups": 1,
    "num_hidden_layers": 61,
    "max_seq_len": 65536,
    "vocab_size": 128815,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 5120,
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "rope_theta": 500000,
    "rope_scaling": None,
    "max_position_embedding": 65536,
    "share_expert_dim": 5120,
    "share_q_dim": 2048,
    "head_dim": 256,
    "norm_expert_weight": False,
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
}
PARTS = {
    "architectures": ["Step3VLForConditionalGeneration"],
    "model_type": "step3_vl",
    "text_config": TEXT,
    "vision_config": {"model_type": "step3_vision_encoder", "hidden_size": 1792},
    "understand_projector_stride": 2,
    "projector_bias": False,
    "image_token_id": 128001,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
# Fields that may be missing, all with the values above as defaults.
OPTIONAL = (
    *("num_attention_groups", "rms_norm_eps", "moe_intermediate_size", "rope_theta", "rope_scaling", "head_dim"),
    *("max_position_embedding", "share_expert_dim", "share_q_dim", "norm_expert_weight"),
)


def _dims(**changes: Any) -> DecoderSpec:
    dims = read_spec({**TEXT, **changes}).dims
    assert isinstance(dims, DecoderSpec)
    return dims


def _with_experts(dims: DecoderSpec) -> list[int]:
    return [index for index, layer in enumerate(dims.layers) if list(specs(layer, ExpertsSpec))]


def _latents(dims: DecoderSpec) -> set[int]:
    return {one.rank for one in specs(dims, QLatentSpec)}


def test_the_published_fields_are_read() -> None:
    spec = read_spec(PARTS)
    assert (spec.max_position, spec.dtype) == (65536, torch.bfloat16)
    assert spec.dims.ropes == (RopeSpec("default", 5e5, 256),)
    attentions = list(specs(spec.dims, AttentionSpec))
    assert {(one.heads, one.kv_heads, one.head_dim, one.scale) for one in attentions} == {(64, 1, 256, None)}
    assert _latents(spec.dims) == {2048} and len(attentions) == 61
    assert _with_experts(spec.dims) == [*range(4, 60)]
    experts = next(specs(spec.dims, ExpertsSpec))
    assert (experts.experts, experts.width, experts.router.top_k) == (48, 5120, 3)
    assert experts.shared is not None and experts.shared.mlp.width == 5120
    assert (experts.router.scores, experts.router.renormalize, experts.router.choice_bias) == ("softmax", False, None)
    assert not spec.dims.head.tied
    assert ignored_fields(PARTS, spec) == ignored_fields(TEXT, read_spec(TEXT)) == ()


def test_fields_left_out_have_the_published_defaults() -> None:
    bare = {name: value for name, value in TEXT.items() if name not in OPTIONAL}
    spec = read_spec(bare)
    assert spec.dims == read_spec(TEXT).dims and spec.max_position == 65536


def test_a_latent_of_null_has_the_size_of_a_head() -> None:
    assert _latents(_dims(share_q_dim=None)) == {256}


@pytest.mark.parametrize(
    ("listed", "found"),
    [("0", [0]), (" 3, 1,2 ", [1, 2, 3]), ("2,2", [2]), ([1, 3], [1, 3]), ([], []), (None, [1, 2, 3])],
    ids=str,
)
def test_layers_with_experts_are_a_text_or_a_list_or_all_but_the_first(listed: Any, found: list[int]) -> None:
    assert _with_experts(_dims(num_hidden_layers=4, moe_layers_enum=listed)) == found


def test_scaled_tables_start_from_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    spec = read_spec({**TEXT, "rope_scaling": scaling})
    assert spec.dims.ropes[0].number("original_max_position") == 65536 and spec.max_position == 4 * 65536


def test_fields_that_the_published_code_does_not_read_are_named() -> None:
    """Its router is always a softmax without a factor; a user learns that the field does nothing."""
    config = {**TEXT, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0}
    spec = read_spec(config)
    assert spec.dims == read_spec(TEXT).dims
    ignored = ("moe_router_activation", "moe_router_scaling_factor")
    assert ignored_fields(config, spec) == ignored_fields({**PARTS, "text_config": config}, read_spec(PARTS)) == ignored


def test_another_rotary_type_is_refused_with_those_that_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling(.|\n)*default, linear, llama3, yarn"):
        _dims(rope_scaling={"rope_type": "dynamic", "factor": 2.0})


def _renamed(folder: Path, prefix: str) -> Path:
    """A checkpoint with images, with the names that the published class saves: all but the head in `model`."""
    file = TINY["step3_vl-parts"].write(folder) / "model.safetensors"
    named = {}
    for name, tensor in load_file(file).items():
        text = name.startswith("model.")
        new = f"model.{prefix}{name.removeprefix('model.')}" if text else f"model.{name}"
        named[name if name.startswith("lm_head") else new] = tensor
    save_file(named, file, metadata={"format": "pt"})
    return folder


def test_names_of_saved_checkpoints_are_found(tmp_path: Path) -> None:
    program = Request.read(_renamed(tmp_path, "language_model."), backend="reference").trace().entries["main"]
    read = {name for spec in program.params.values() for name in spec.recipe.sources()}
    assert "model.language_model.layers.0.moe.up_proj.weight" in read
    assert not [name for name in read if name.startswith("model.vi")], "tensors of images are not read"


def test_tensors_of_images_are_extra_in_a_text_model(tmp_path: Path) -> None:
    file = TINY["step3_text-listed"].write(tmp_path) / "model.safetensors"
    save_file({**load_file(file), "vit_downsampler.bias": torch.ones(8)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"extra(.|\n)*vit_downsampler"):
        Request.read(tmp_path, backend="reference").trace()


@pytest.mark.parametrize("name", ["inter_norm.weight", "wq.weight"])
def test_a_checkpoint_without_a_part_of_the_latent_is_refused(name: str, tmp_path: Path) -> None:
    file = TINY["step3_text-listed"].write(tmp_path) / "model.safetensors"
    kept = {key: one for key, one in load_file(file).items() if key != f"model.layers.1.self_attn.{name}"}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"missing(.|\n)*layers\.1\.self_attn\.{name}"):
        Request.read(tmp_path, backend="reference").trace()
