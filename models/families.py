"""How each family of dense decoders spells its config.json: one reader a family, in terms of DenseSpec's flags."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.config import MAX_LAYERS, ConfigReader, RopeSpec
from ingot.models.dense import DenseSpec, LayerSpec

_SILU = {"silu": "silu"}
# Transformers, configuration_cwm.py.
_CWM_ROPE = {
    "rope_theta": 1e6,
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _base(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    eps_field: str = "rms_norm_eps",
    eps: float = 1e-6,
    tied: bool = False,
    activations: Mapping[str, str] = _SILU,
    activation_field: str = "hidden_act",
    **flags: Any,
) -> DenseSpec:
    """What all of them spell alike; the defaults that differ are arguments, the first of `activations` one of them.
    `flags` are DenseSpec's."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", head_dim or hidden // heads or 1)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} attention heads over {kv_heads} key-value heads", where=config.source, expected="a multiple"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd", where=config.source, expected="an even number, for rope")
    layers = _layer_count(config)
    flags.setdefault("layers", (LayerSpec(),) * layers)
    flags.setdefault("ropes", None)
    if flags["ropes"] is None:
        flags["ropes"] = (config.rope(head_dim, theta=rope_theta),)
    return DenseSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number(eps_field, eps),
        tied=config.flag("tie_word_embeddings", tied),
        activation=config.choice(activation_field, activations, next(iter(activations))),
        **flags,
    )


def _attention_bias(config: ConfigReader) -> dict[str, bool]:
    bias = config.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _layer_count(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", most=MAX_LAYERS)


def _windows(
    config: ConfigReader,
    sliding: tuple[bool, ...],
    default: int | None = None,
    ropes: tuple[int | None, int | None] = (0, 0),
) -> tuple[LayerSpec, ...]:
    """Layers with the config's window where `sliding`; `ropes` are the tables of layers without and with a window."""
    window = config.integer_or_none("sliding_window") or default
    if window is None and any(sliding):
        raise config.error("sliding_window", "a window, for the layers of type sliding_attention")
    return tuple(LayerSpec(window if slides else None, ropes[slides]) for slides in sliding)


def _two_ropes(config: ConfigReader, head_dim: int, *, full: float, sliding: float) -> tuple[RopeSpec, RopeSpec]:
    """The tables of layers without and with a window, with their default bases. In the old spelling only the first is
    scaled."""
    local = {name: value for name, value in config.fields.items() if name != "rope_scaling"}
    return (
        config.rope(head_dim, layer_type="full_attention", theta=full),
        config.within(local).rope(head_dim, layer_type="sliding_attention", theta=sliding),
    )


def llama(config: ConfigReader) -> DenseSpec:
    return _base(config, mlp_bias=config.flag("mlp_bias", False), **_attention_bias(config))


def mistral(config: ConfigReader) -> DenseSpec:
    """One window for all layers, or none. A missing field is transformers' default, 4096; null is none."""
    window = config.integer_or_none("sliding_window") if "sliding_window" in config.fields else 4096
    return _base(config, layers=(LayerSpec(window=window),) * _layer_count(config))


def ministral(config: ConfigReader) -> DenseSpec:
    """Mistral with a window in the layers that `layer_types` names, or in all."""
    if "sliding_window" in config.fields and config.integer_or_none("sliding_window") is None:
        return _base(config)
    sliding = config.sliding_layers(_layer_count(config), pattern=None)
    return _base(config, layers=_windows(config, sliding, default=4096))


def cwm(config: ConfigReader) -> DenseSpec:
    """Llama with windows, save in each first of four layers; Llama 3's rope unless it says otherwise."""
    sliding = config.sliding_layers(_layer_count(config), pattern=4, first_full=True)
    if config.fields.get("rope_parameters") is None and config.fields.get("rope_scaling") is None:
        config = config.within({**config.fields, "rope_scaling": _CWM_ROPE})
    return _base(
        config,
        head_dim=128,
        rope_theta=1e6,
        eps=1e-5,
        layers=_windows(config, sliding, default=8192),
        mlp_bias=config.flag("mlp_bias", False),
    )


def seed_oss(config: ConfigReader) -> DenseSpec:
    return _base(
        config,
        head_dim=128,
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def helium(config: ConfigReader) -> DenseSpec:
    return _base(
        config,
        head_dim=128,
        rope_theta=1e5,
        eps=1e-8,
        norm_wide=True,
        rope_interleaved=True,
        qkv_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def ernie4_5(config: ConfigReader) -> DenseSpec:
    bias = config.flag("use_bias", False)
    return _base(
        config,
        head_dim=128,
        rope_theta=5e5,
        eps=1e-5,
        tied=True,
        rope_interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _qwen(config: ConfigReader, **flags: Any) -> DenseSpec:
    """A window from layer `max_window_layers` on, where `use_sliding_window`."""
    layers = _layer_count(config)
    if not config.flag("use_sliding_window", False):
        return _base(config, **flags)
    types = config.listed("layer_types", layers, ("sliding_attention", "full_attention"))
    if types is None:
        first = config.integer("max_window_layers", 28)
        types = tuple("sliding_attention" if index >= first else "full_attention" for index in range(layers))
    sliding = tuple(kind == "sliding_attention" for kind in types)
    return _base(config, layers=_windows(config, sliding, default=4096), **flags)


def qwen2(config: ConfigReader) -> DenseSpec:
    return _qwen(config, qkv_bias=True)


def qwen3(config: ConfigReader) -> DenseSpec:
    # 128 is Qwen3's own default, apart from hidden_size / heads (transformers, configuration_qwen3.py).
    return _qwen(config, head_dim=128, qk_norm="head", **_attention_bias(config))


def phi3(config: ConfigReader) -> DenseSpec:
    window = config.integer_or_none("sliding_window")
    layers = (LayerSpec(window=window),) * _layer_count(config)
    return _base(config, eps=1e-5, layers=layers, fused_weights=True)


def _gemma(config: ConfigReader, **flags: Any) -> DenseSpec:
    config.require("use_bidirectional_attention", (False,), False)
    return _base(
        config,
        head_dim=256,
        tied=True,
        norm_offset=1.0,
        embed_scale=config.integer("hidden_size") ** 0.5,
        embed_scale_rounded=True,
        **_attention_bias(config),
        **flags,
    )


def gemma(config: ConfigReader) -> DenseSpec:
    # The first checkpoints say "gelu" and mean its tanh form (transformers, configuration_gemma.py).
    return _gemma(config, activations=dict.fromkeys(("gelu_pytorch_tanh", "gelu"), "gelu_tanh"))


def _gemma_post_norm(config: ConfigReader, *, logit_cap: float | None, **flags: Any) -> DenseSpec:
    """What Gemma 2 and 3 share. `logit_cap` is the family's default."""
    return _gemma(
        config,
        activations=_GELU,
        activation_field="hidden_activation",
        post_norm=True,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=_cap(config, "final_logit_softcapping", logit_cap),
        **flags,
    )


def _cap(config: ConfigReader, field: str, default: float | None) -> float | None:
    """A soft-cap: null switches it off, a missing field is the family's default."""
    return config.number_or_none(field) if field in config.fields else default


def gemma2(config: ConfigReader) -> DenseSpec:
    """Every second layer has a window, the first one included."""
    sliding = config.sliding_layers(_layer_count(config), pattern=2)
    cap = _cap(config, "attn_logit_softcapping", 50.0)
    return _gemma_post_norm(config, layers=_windows(config, sliding, 4096), attention_soft_cap=cap, logit_cap=30.0)


def gemma3(config: ConfigReader) -> DenseSpec:
    """Layers with a window have a rotary base of their own."""
    config.require("attn_logit_softcapping", (None,), None)  # transformers reads it and does not apply it
    pattern = config.integer("sliding_window_pattern", 6)
    layers = _windows(config, config.sliding_layers(_layer_count(config), pattern), 4096, ropes=(0, 1))
    full, local = _two_ropes(config, config.integer("head_dim", 256), full=1e6, sliding=1e4)
    if config.fields.get("rope_parameters") is None:  # `rope_theta` is the base of the first one alone
        local = replace(local, theta=config.number("rope_local_base_freq", 1e4))
    return _gemma_post_norm(config, layers=layers, ropes=(full, local), qk_norm="head", logit_cap=None)


def _olmo(config: ConfigReader, **flags: Any) -> DenseSpec:
    return _base(
        config,
        eps=1e-5,
        norm_wide=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="full",
        **_attention_bias(config),
        **flags,
    )


def olmo2(config: ConfigReader) -> DenseSpec:
    return _olmo(config)


def olmo3(config: ConfigReader) -> DenseSpec:
    """OLMo 2 with a window in all but every fourth layer; layers with a window have a table without scaling."""
    sliding = config.sliding_layers(_layer_count(config), pattern=4)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    ropes = _two_ropes(config, config.integer("head_dim", hidden // heads or 1), full=5e5, sliding=5e5)
    return _olmo(config, layers=_windows(config, sliding, 4096, ropes=(0, 1)), ropes=ropes)


def exaone4(config: ConfigReader) -> DenseSpec:
    """In a model with windows, layers without one have no rotation."""
    layers = _layer_count(config)
    specs = (LayerSpec(),) * layers
    if "sliding_window" not in config.fields or config.integer_or_none("sliding_window"):
        pattern = 4 if config.fields.get("layer_types") else config.integer("sliding_window_pattern", 4)
        specs = _windows(config, config.sliding_layers(layers, pattern), 4096, ropes=(None, 0))
    return _base(config, eps=1e-5, pre_norm=False, post_norm=True, qk_norm="head", layers=specs)


def _granite(config: ConfigReader, **flags: Any) -> DenseSpec:
    return _base(
        config,
        mlp_bias=config.flag("mlp_bias", False),
        embed_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        **_attention_bias(config),
        **flags,
    )


def granite(config: ConfigReader) -> DenseSpec:
    return _granite(
        config,
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def hyperclovax(config: ConfigReader) -> DenseSpec:
    """Granite with norms behind attention and MLP as well; logits are multiplied where Granite divides."""
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads") or 1)
    return _granite(
        config,
        attention_scale=config.number("attention_multiplier", head_dim**-0.5),
        logit_scale=config.number("logits_scaling", 1.0),
        post_norm=config.flag("use_post_norm", True),
        post_norm_names=("post_norm1", "post_norm2"),
    )


def _cohere(config: ConfigReader, **flags: Any) -> DenseSpec:
    return _base(
        config,
        eps_field="layer_norm_eps",
        eps=1e-5,
        tied=True,
        norm="layer",
        norm_wide=True,
        parallel=True,
        rope_interleaved=True,
        logit_scale=config.number("logit_scale", 0.0625),
        **_attention_bias(config),
        **flags,
    )


def cohere(config: ConfigReader) -> DenseSpec:
    return _cohere(config, rope_theta=5e5, qk_norm="head" if config.flag("use_qk_norm", False) else None)


def cohere2(config: ConfigReader) -> DenseSpec:
    """Layers with a window are rotated, the others, every fourth, are not."""
    sliding = config.sliding_layers(_layer_count(config), config.integer("sliding_window_pattern", 4))
    return _cohere(config, layers=_windows(config, sliding, 4096, ropes=(None, 0)))


def smollm3(config: ConfigReader) -> DenseSpec:
    """Every `no_rope_layer_interval`-th layer has no rotation, or those that `no_rope_layers` marks with 0."""
    layers = _layer_count(config)
    rotated = config.listed("no_rope_layers", layers, (0, 1))
    if rotated is None:
        interval = config.integer("no_rope_layer_interval", 4)
        rotated = tuple(int((index + 1) % interval != 0) for index in range(layers))
    sliding = (False,) * layers
    if config.flag("use_sliding_window", False) and config.integer_or_none("sliding_window"):
        types = config.listed("layer_types", layers, ("sliding_attention", "full_attention"))
        sliding = (
            tuple(not keep for keep in rotated) if types is None else tuple(t == "sliding_attention" for t in types)
        )
    specs = tuple(
        replace(layer, rope=0 if keep else None) for layer, keep in zip(_windows(config, sliding), rotated, strict=True)
    )
    return _base(
        config,
        rope_theta=2000000.0,
        tied=True,
        layers=specs,
        mlp_bias=config.flag("mlp_bias", False),
        **_attention_bias(config),
    )
