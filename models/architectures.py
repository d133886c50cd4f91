"""The table of architectures: the name in a config.json, and what reads, defines and loads such a model."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ingot.ir.errors import ConfigError
from ingot.ir.program import ModelSpec
from ingot.ir.recipe import Recipe
from ingot.ir.types import Placement
from ingot.models import dense
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.dense import DenseSpec


@dataclass(frozen=True)
class Definition:
    """What the rest of Ingot asks of a model definition, as functions of its own spec."""

    build: Callable[[Any, torch.dtype, int], nn.Module]
    weight_map: Callable[[Any, int], dict[str, Recipe]]
    ignored: Callable[[Any], tuple[str, ...]]
    placement: Callable[[str], tuple[Placement, ...]]
    expected_matches: Callable[[Any], dict[str, int]]


DENSE = Definition(
    build=dense.DenseDecoder,
    weight_map=dense.weight_map,
    ignored=lambda spec: dense.IGNORED_WHEN_TIED if spec.tied else dense.IGNORED,
    placement=dense.placement,
    expected_matches=dense.expected_matches,
)


@dataclass(frozen=True)
class Architecture:
    """One row: how a family's config reads, and the definition that it feeds."""

    family: str
    read: Callable[[ConfigReader], Any]
    definition: Definition


def _dense_spec(config: ConfigReader, *, head_dim: int | None = None, **flags: bool) -> DenseSpec:
    """What all Llama-like configs spell alike."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", head_dim or hidden // heads or 1)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} attention heads over {kv_heads} key-value heads", where=config.source, expected="a multiple"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd", where=config.source, expected="an even number, for rope")
    config.require("hidden_act", ("silu",), "silu")
    return DenseSpec(
        hidden=hidden,
        layers=config.integer("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=config.rope(head_dim),
        tied=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        **flags,
    )


def _llama(config: ConfigReader) -> DenseSpec:
    return _dense_spec(config, mlp_bias=config.flag("mlp_bias", False))


def _qwen3(config: ConfigReader) -> DenseSpec:
    config.require("use_sliding_window", (False,), False)
    # 128 is Qwen3's own default, apart from hidden_size / heads (transformers, configuration_qwen3.py).
    return _dense_spec(config, head_dim=128, qk_norm=True)


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", _llama, DENSE),
    "Qwen3ForCausalLM": Architecture("qwen3", _qwen3, DENSE),
}


def architecture_of(config: Mapping[str, Any], source: str) -> tuple[str, Architecture]:
    """The row for a config.json; ConfigError naming the nearest known one otherwise."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"field 'architectures' is {names!r}", where=source, expected="a list with one name")
    name = names[0]
    if name not in ARCHITECTURES:
        nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)
        raise ConfigError(
            f"architecture '{name}' is not supported",
            where=source,
            expected=", ".join(ARCHITECTURES),
            hint=f"the nearest supported one is '{nearest[0]}'",
        )
    return name, ARCHITECTURES[name]


def read_spec(config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """The ModelSpec that a config.json describes."""
    name, architecture = architecture_of(config, source)
    reader = ConfigReader(config, source)
    bos = reader.token_ids("bos_token_id")
    dims = architecture.read(reader)
    return ModelSpec(
        architecture=name,
        family=architecture.family,
        dtype=reader.dtype(),
        vocab_size=dims.vocab,
        max_position=reader.integer("max_position_embeddings", 2048),
        eos_token_ids=reader.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        dims=dims,
    )
