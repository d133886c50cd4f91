"""Bloom's published checkpoints: names without a prefix, and fields by two names."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.numerics.harness import load_params
from ingot.models.architectures import read_spec

TENSORS = "model.safetensors"


def params(folder: Path) -> dict[str, torch.Tensor]:
    program = Request.read(folder, backend="reference").trace().entries["main"]
    return load_params(program.params, Checkpoint.open(folder).read)


def test_names_may_lack_their_first_part(tmp_path: Path) -> None:
    plain, bare = (TINY["bloom-tied"].write(tmp_path / name) for name in ("plain", "bare"))
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(bare / TENSORS).items()}
    assert "word_embeddings.weight" in tensors and not any(name.startswith("transformer.") for name in tensors)
    save_file(tensors, bare / TENSORS, metadata={"format": "pt"})
    expected, found = params(plain), params(bare)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_q_k_and_v_of_a_head_lie_one_after_the_other(tmp_path: Path) -> None:
    folder = TINY["bloom-tied"].write(tmp_path)
    stored = load_file(folder / TENSORS)["transformer.h.1.self_attention.query_key_value.weight"]
    found, heads = params(folder), stored.view(6, 3, 12, 72)
    for place, name in enumerate("qkv"):
        assert torch.equal(found[f"layers.1.attention.{name}.weight"], heads[:, place].flatten(0, 1))


def test_layers_have_the_slopes_of_their_heads(tmp_path: Path) -> None:
    found = params(TINY["bloom-tied"].write(tmp_path))
    expected = 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0, 1.0, 3.0])  # four heads, and two between them
    for layer in range(3):
        assert torch.equal(found[f"layers.{layer}.attention.slopes"], expected)


def test_fields_have_two_names() -> None:
    """The largest checkpoint has the second ones."""
    config = dict(TINY["bloom-tied"].config)
    names = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    other = {names.get(name, name): value for name, value in config.items()}
    assert other.keys() != config.keys() and read_spec(other).dims == read_spec(config).dims


def test_the_context_is_what_the_config_says() -> None:
    config = TINY["bloom-tied"].config
    assert read_spec({**config, "seq_length": 77}).max_position == 77
    bare = {name: value for name, value in config.items() if name != "seq_length"}
    assert read_spec(bare).max_position == 2048
