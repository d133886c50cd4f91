"""Read the config fields that have the same names in most model families. Defaults that differ are arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedSpec, PlainSpec
from ingot.models.blocks.head import HeadSpec
from ingot.models.blocks.layer import BlockSpec, BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec

# The op's activation by transformers' name (activations.py); several names compute one function in different ways.
GELU = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}
PLAIN = {**GELU, "relu": "relu", "relu2": "relu_squared"}  # of plain feed-forward parts
SILU = {"silu": "silu"}
# The rotary types that the published code of most families supports, for families that transformers lacks.
PUBLISHED_ROPES = ("default", "linear", "dynamic")


def count_layers(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", most=MAX_LAYERS)


def read_head_dim(config: ConfigReader, default: int | None = None) -> int:
    """Return the number of elements of a head: the field `head_dim`, else `default`, else hidden size / heads."""
    return config.integer(
        "head_dim", default or config.integer("hidden_size") // config.integer("num_attention_heads") or 1
    )


def require_square_heads(config: ConfigReader) -> int:
    """Return the number of elements of a head, for families in which it is always hidden size / heads.

    Raises ConfigError if this is no whole number, or if the field `head_dim` has another value.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} over num_attention_heads {heads}", where=config.source, expected="a multiple"
        )
    config.require("head_dim", (hidden // heads,), hidden // heads)
    return hidden // heads


def read_attention(config: ConfigReader, *, head_dim: int | None = None, **fields: Any) -> AttentionSpec:
    """Return the spec of an attention, with heads, k/v heads and head size from the config.

    `head_dim` is the head size if the config has none. `fields` set further fields of AttentionSpec. Raises ConfigError
    if the heads are no multiple of the k/v heads, or if the head size is odd.
    """
    size, heads = read_head_dim(config, head_dim), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} attention heads over {kv_heads} key-value heads", where=config.source, expected="a multiple"
        )
    if size % 2:
        raise ConfigError(f"head_dim {size} is odd", where=config.source, expected="an even number, for rope")
    return AttentionSpec(heads, kv_heads, size, **fields)


def read_biases(config: ConfigReader) -> dict[str, bool]:
    """Return the arguments `bias` and `o_bias` of AttentionSpec. Both equal the field `attention_bias`.

    If the field is missing, both are False.
    """
    bias = config.flag("attention_bias", False)
    return {"bias": bias, "o_bias": bias}


def read_gated(
    config: ConfigReader,
    *,
    activations: Mapping[str, str] = SILU,
    activation_field: str = "hidden_act",
    **fields: Any,
) -> GatedSpec:
    """Return the spec of a gated feed-forward part, with width and activation from the config.

    activations        activation name in the config -> activation name in Ingot. The first one is the default.
    activation_field   config field with the activation's name
    fields             further fields of GatedSpec
    """
    activation = config.choice(activation_field, activations, next(iter(activations)))
    return GatedSpec(config.integer("intermediate_size"), activation, **fields)


def read_plain(config: ConfigReader, activation: str, **fields: Any) -> PlainSpec:
    """Return the spec of a plain feed-forward part, with width and activation from the config.

    `activation` is the default activation, with its name in configs, such as "relu2". `fields` set further fields of
    PlainSpec.
    """
    return PlainSpec(config.integer("intermediate_size"), config.choice("hidden_act", PLAIN, activation), **fields)


def read_norm(config: ConfigReader, eps: float = 1e-6, field: str = "rms_norm_eps", **fields: Any) -> NormSpec:
    """Return the spec of a norm. Its epsilon is the config field `field`, or `eps` if that is missing.

    `fields` set further fields of NormSpec.
    """
    return NormSpec(config.number(field, eps), **fields)


def read_head(config: ConfigReader, *, tied: bool = False, **fields: Any) -> HeadSpec:
    """Return the spec of the language-model head. The field `tie_word_embeddings` says whether it is tied.

    `tied` replaces this field if it is missing. `fields` set further fields of HeadSpec.
    """
    return HeadSpec(tied=config.flag("tie_word_embeddings", tied), **fields)


def read_decoder(
    config: ConfigReader,
    layers: Iterable[LayerSpec],
    norm: NormSpec | None,
    *ropes: RopeSpec,
    head: HeadSpec | None = None,
    embedding: EmbeddingSpec | None = None,
    names: DecoderNames | None = None,
) -> DecoderSpec:
    """Return the spec of a decoder, with vocabulary size and hidden size from the config.

    layers                   the layers
    norm                     the norm before the head; None: no norm
    ropes                    rotary embeddings, which attentions refer to by index
    head, embedding, names   None: as in Llama. The config says whether Llama's head is tied.
    """
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        ropes=ropes,
        embedding=embedding or EmbeddingSpec(),
        head=head or read_head(config),
        names=names or DecoderNames(),
    )


def pre_norm_layer(attention: BlockSpec, mlp: BlockSpec, norm: NormSpec, scale: float | None = None) -> LayerSpec:
    """Return a layer as in Llama, in which attention and MLP read the normed residual stream.

    `norm` is the spec of both norms. `scale` is a factor on the results of attention and MLP; None: no factor.
    """
    branches = (
        BranchSpec("attention", attention, norm.named("input_layernorm")),
        BranchSpec("mlp", mlp, norm.named("post_attention_layernorm")),
    )
    return LayerSpec(branches, scale=scale)


def post_norm_layer(attention: AttentionSpec, mlp: GatedSpec, norm: NormSpec) -> LayerSpec:
    """Return a layer as in OLMo 2, in which the results of attention and MLP are normed and then added to the stream.

    `norm` is the spec of both norms.
    """
    branches = (
        BranchSpec("attention", attention, post_norm=norm.named("post_attention_layernorm")),
        BranchSpec("mlp", mlp, post_norm=norm.named("post_feedforward_layernorm")),
    )
    return LayerSpec(branches)


def read_windows(
    config: ConfigReader,
    attention: AttentionSpec,
    sliding: tuple[bool, ...],
    default: int | None = None,
    tables: tuple[int | None, int | None] = (0, 0),
) -> list[AttentionSpec]:
    """Return the attention of each layer. It is `attention`, with or without the config's sliding window.

    sliding   for each layer, whether it has a window
    default   size of the window if the config has none
    tables    (index of the rotary table in layers without a window, index in layers with one). An index of None means
              no rotary embedding.
    """
    window = config.integer_or_none("sliding_window") or default
    if window is None and any(sliding):
        raise config.error("sliding_window", "a window, for the layers of type sliding_attention")
    plain = attention.rotary or RotarySpec()
    rotaries = [None if table is None else replace(plain, table=table) for table in tables]
    return [replace(attention, window=window if slides else None, rotary=rotaries[slides]) for slides in sliding]


def read_rope(
    config: ConfigReader, head_dim: int, kinds: tuple[str, ...] = PUBLISHED_ROPES, theta: float = 10000.0
) -> RopeSpec:
    """Return the rotary embedding from the config. It rotates whole heads, which have `head_dim` elements.

    `kinds` are the rope types that the family's published code supports, and `theta` is the base if the config has
    none. Raises ConfigError for another type.
    """
    config.require("partial_rotary_factor", (1.0,), 1.0)
    rope = config.rope(head_dim, theta=theta)
    if rope.rope_type not in kinds:
        field = "rope_scaling" if config.fields.get("rope_parameters") is None else "rope_parameters"
        raise config.error(field, f"one of the types in the family's published code: {', '.join(kinds)}")
    return rope


def read_two_ropes(config: ConfigReader, head_dim: int, *, full: float, sliding: float) -> tuple[RopeSpec, RopeSpec]:
    """Return the two rotary embeddings of a model: for layers without a window, and for layers with one.

    `full` is the default base of the first, and `sliding` of the second. The older field `rope_scaling` affects only
    the first.
    """
    local = {name: value for name, value in config.fields.items() if name != "rope_scaling"}
    return (
        config.rope(head_dim, layer_type="full_attention", theta=full),
        config.within(local).rope(head_dim, layer_type="sliding_attention", theta=sliding),
    )
