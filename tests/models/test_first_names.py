"""GPT-NeoX, GPT-J and Falcon as their checkpoints have them: buffers that nothing reads, names without a prefix, tables
of positions by names of their own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.numerics.harness import load_params
from ingot.models.architectures import read_spec

TENSORS = "model.safetensors"
MASK = torch.ones(1, 1, 8, 8).tril()
# What older checkpoints carry beside their weights, by layer.
BUFFERS = {
    "gpt_neox-parallel": {
        "gpt_neox.layers.{}.attention.bias": MASK,
        "gpt_neox.layers.{}.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": torch.ones(5),
    },
    "gptj-plain": {
        "transformer.h.{}.attn.bias": MASK,
        "transformer.h.{}.attn.masked_bias": torch.tensor(-1e9),
        "transformer.h.{}.attn.embed_positions": torch.ones(8, 10),
    },
    "codegen-blocks": {"transformer.h.{}.attn.causal_mask": MASK},
}


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_not_read(name: str, tmp_path: Path) -> None:
    plain, more = TINY[name].write(tmp_path / "plain"), TINY[name].write(tmp_path / "more")
    tensors = load_file(more / TENSORS)
    tensors |= {key.format(index): one.clone() for key, one in BUFFERS[name].items() for index in range(2)}
    save_file(tensors, more / TENSORS, metadata={"format": "pt"})
    assert same(params(plain), params(more))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gpt_neox-sequential", "gpt_neox."), ("falcon-new", "transformer."), ("falcon-query", "transformer.")],
)
def test_a_checkpoint_without_the_prefix_is_the_same_model(name: str, prefix: str, tmp_path: Path) -> None:
    """Of the model without its head, which is tied."""
    plain, bare = TINY[name].write(tmp_path / "plain"), TINY[name].write(tmp_path / "bare")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(bare / TENSORS).items()}
    save_file(tensors, bare / TENSORS, metadata={"format": "pt"})
    assert same(params(plain), params(bare))


def test_a_copy_of_a_tied_head_is_not_read(tmp_path: Path) -> None:
    plain, more = TINY["falcon-query"].write(tmp_path / "plain"), TINY["falcon-query"].write(tmp_path / "more")
    tensors = load_file(more / TENSORS)
    copy = {"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}
    save_file({**tensors, **copy}, more / TENSORS, metadata={"format": "pt"})
    assert same(params(plain), params(more))


def test_gpt_neox_spellings_of_a_table_read_the_same() -> None:
    old = TINY["gpt_neox-parallel"].config
    new = {name: value for name, value in old.items() if name not in ("rotary_pct", "rotary_emb_base")}
    table = {"rope_type": "linear", "factor": 2.5}
    inside = {**table, "rope_theta": 811.0, "partial_rotary_factor": 0.75}
    assert read_spec({**new, "rope_parameters": inside}).dims == read_spec({**old, "rope_scaling": table}).dims
    beside = {"rope_theta": 5.0, "partial_rotary_factor": 0.5}  # which transformers does not look at
    assert read_spec({**old, **beside}).dims == read_spec(old).dims


def test_n_positions_is_the_context() -> None:
    assert read_spec({**TINY["gptj-plain"].config, "n_positions": 77}).max_position == 77


@pytest.mark.parametrize("name", ["stablelm-normed", "gpt_neox-parallel", "falcon-new", "gptj-plain", "codegen-blocks"])
def test_the_context_without_a_field_is_transformers(name: str) -> None:
    from transformers import CONFIG_MAPPING

    config = {key: value for key, value in TINY[name].config.items() if "position" not in key}
    wanted = CONFIG_MAPPING[config["model_type"]]().max_position_embeddings
    assert read_spec(config).max_position == wanted


def test_first_names_of_falcon_beside_todays() -> None:
    """The fields were renamed, the architecture was not."""
    config = TINY["falcon-new"].config
    assert read_spec({**config, "architectures": ["RWForCausalLM"]}).dims == read_spec(config).dims
    wide = {**config, "hidden_size": 1, "n_embed": config["hidden_size"]}
    assert read_spec(wide).dims == read_spec(config).dims
