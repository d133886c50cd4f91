"""How each family of dense decoders spells its config.json: one reader a family, in terms of DenseSpec's flags."""

from dataclasses import replace
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.config import MAX_LAYERS, ConfigReader
from ingot.models.dense import DenseSpec, LayerSpec

_SILU = {"silu": "silu"}
_GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _base(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    rope_theta: float = 10000.0,
    eps_field: str = "rms_norm_eps",
    eps: float = 1e-6,
    tied: bool = False,
    activations: dict[str, str] = _SILU,
    **flags: Any,
) -> DenseSpec:
    """What all of them spell alike; the defaults that differ are arguments. `flags` are DenseSpec's."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", head_dim or hidden // heads or 1)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} attention heads over {kv_heads} key-value heads", where=config.source, expected="a multiple"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd", where=config.source, expected="an even number, for rope")
    layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
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
        activation=config.choice("hidden_act", activations, "silu"),
        **flags,
    )


def _attention_bias(config: ConfigReader) -> dict[str, bool]:
    bias = config.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _windows(config: ConfigReader, sliding: tuple[bool, ...], default: int | None = None) -> tuple[LayerSpec, ...]:
    """Layers with the config's window where `sliding`."""
    window = config.integer_or_none("sliding_window") or default
    if window is None and any(sliding):
        raise config.error("sliding_window", "a window, for the layers of type sliding_attention")
    return tuple(LayerSpec(window=window if slides else None) for slides in sliding)


def llama(config: ConfigReader) -> DenseSpec:
    return _base(config, mlp_bias=config.flag("mlp_bias", False), **_attention_bias(config))


def mistral(config: ConfigReader) -> DenseSpec:
    """One window for all layers, or none. A missing field is transformers' default, 4096; null is none."""
    window = config.integer_or_none("sliding_window") if "sliding_window" in config.fields else 4096
    return _base(config, layers=(LayerSpec(window=window),) * config.integer("num_hidden_layers", most=MAX_LAYERS))


def _qwen(config: ConfigReader, **flags: Any) -> DenseSpec:
    """A window from layer `max_window_layers` on, where `use_sliding_window`."""
    layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
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
    layers = (LayerSpec(window=window),) * config.integer("num_hidden_layers", most=MAX_LAYERS)
    return _base(config, eps=1e-5, layers=layers, fused_weights=True)


def _gemma(config: ConfigReader, **flags: Any) -> DenseSpec:
    config.require("use_bidirectional_attention", (False,), False)
    hidden = config.integer("hidden_size")
    base = ConfigReader({**config.fields, "hidden_act": config.fields.get("hidden_activation")}, config.source)
    spec = _base(
        base,
        head_dim=256,
        tied=True,
        activations=_GELU,
        norm_offset=1.0,
        post_norm=True,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=_cap(config, "final_logit_softcapping", flags.pop("logit_cap")),
        attention_soft_cap=_cap(config, "attn_logit_softcapping", flags.pop("attention_cap")),
        embed_scale=hidden**0.5,
        embed_scale_rounded=True,
        **_attention_bias(config),
        **flags,
    )
    return spec


def _cap(config: ConfigReader, field: str, default: float | None) -> float | None:
    """A soft-cap: null switches it off, a missing field is the family's default."""
    return config.number_or_none(field) if field in config.fields else default


def gemma2(config: ConfigReader) -> DenseSpec:
    """Every second layer has a window, the first one included."""
    sliding = config.sliding_layers(config.integer("num_hidden_layers", most=MAX_LAYERS), pattern=2)
    return _gemma(config, layers=_windows(config, sliding, 4096), attention_cap=50.0, logit_cap=30.0)


def gemma3(config: ConfigReader) -> DenseSpec:
    """Layers with a window have a rotary base of their own."""
    pattern = config.integer("sliding_window_pattern", 6)
    sliding = config.sliding_layers(config.integer("num_hidden_layers", most=MAX_LAYERS), pattern)
    layers = tuple(
        replace(layer, rope=1 if slides else 0)
        for layer, slides in zip(_windows(config, sliding, 4096), sliding, strict=True)
    )
    head_dim = config.integer("head_dim", 256)
    local = {name: value for name, value in config.fields.items() if name not in ("rope_theta", "rope_scaling")}
    if "rope_local_base_freq" in config.fields:
        local["rope_theta"] = config.fields["rope_local_base_freq"]
    ropes = (
        config.rope(head_dim, layer_type="full_attention", theta=1e6),
        ConfigReader(local, config.source).rope(head_dim, layer_type="sliding_attention", theta=1e4),
    )
    return _gemma(config, layers=layers, ropes=ropes, qk_norm="head", attention_cap=None, logit_cap=None)


def olmo2(config: ConfigReader) -> DenseSpec:
    return _base(
        config,
        eps=1e-5,
        norm_wide=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="full",
        **_attention_bias(config),
    )


def granite(config: ConfigReader) -> DenseSpec:
    return _base(
        config,
        mlp_bias=config.flag("mlp_bias", False),
        embed_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        **_attention_bias(config),
    )


def cohere(config: ConfigReader) -> DenseSpec:
    return _base(
        config,
        rope_theta=500000.0,
        eps_field="layer_norm_eps",
        eps=1e-5,
        tied=True,
        norm="layer",
        norm_wide=True,
        parallel=True,
        rope_interleaved=True,
        qk_norm="head" if config.flag("use_qk_norm", False) else None,
        logit_scale=config.number("logit_scale", 0.0625),
        **_attention_bias(config),
    )


def smollm3(config: ConfigReader) -> DenseSpec:
    """Every `no_rope_layer_interval`-th layer has no rotation, or those that `no_rope_layers` marks with 0."""
    layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
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
