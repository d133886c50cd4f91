"""Read the config of Solar Pro: Llama with a window, and skip connections from earlier layers to later ones."""

from dataclasses import replace

from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.skips import SkipSpec
from ingot.models.config import ConfigReader
from ingot.models.families.reading import (
    count_layers,
    pre_norm_layer,
    read_attention,
    read_biases,
    read_decoder,
    read_gated,
    read_norm,
)

# Defaults of SolarConfig, as in LoRAX (flash_solar_modeling.py).
_WINDOW = 2047
_KEPT, _MIXED = ((12, 20, 32, 44), (20, 32)), ((16, 24, 36, 48), (28, 40))
_WEIGHTS = (0.9, 0.8)


def solar(config: ConfigReader) -> DecoderSpec:
    """Return the spec that a config.json of Solar Pro describes, read as in vLLM (solar.py).

    All layers have the window `sliding_window`, which includes the token's own position.
    """
    window = config.integer_or_none("sliding_window") if "sliding_window" in config.fields else _WINDOW
    norm, layers = read_norm(config), count_layers(config)
    attention = read_attention(config, window=window, **read_biases(config))
    layer = pre_norm_layer(attention, read_gated(config, bias=config.flag("mlp_bias", False)), norm)
    spec = read_decoder(config, [layer] * layers, norm, config.rope(attention.head_dim))
    return replace(spec, skips=_skips(config, layers))


def _skips(config: ConfigReader, layers: int) -> tuple[SkipSpec, ...]:
    """Return the skip connections of a model with `layers` layers.

    The model has two slots, and each keeps one layer input at a time. Layers in `bskcn_1` store their input in slot 1.
    Layers in `bskcn_3` read a weighted sum of their input and slot 1. `bskcn_2` and `bskcn_4` do this for slot 2.
    """
    weight = _weight(config)
    kept = [_layers(config, f"bskcn_{number}", layers, default) for number, default in enumerate(_KEPT, 1)]
    mixed = [_layers(config, f"bskcn_{number}", layers, default) for number, default in enumerate(_MIXED, 3)]
    skips = []
    for index in range(layers):
        for place in (0, 1):
            if index not in mixed[place]:
                continue
            starts = [start for start in kept[place] if start <= index]
            if not starts or index == 0:
                raise config.error(f"bskcn_{place + 3}", f"layers after one of bskcn_{place + 1}")
            skips.append(SkipSpec(max(starts), index, weight))
    return tuple(skips)


def _layers(config: ConfigReader, field: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.fields.get(field)
    value = list(default) if value is None else value
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < layers for item in value):
        raise config.error(field, f"a list of layers, each from 0 to {layers - 1}")
    return tuple(value)


def _weight(config: ConfigReader) -> float:
    """Return the weight of skip connections: the second number of `bskcn_tv`. The first is used only in training."""
    value = config.fields.get("bskcn_tv")
    value = list(_WEIGHTS) if value is None else value
    numbers = isinstance(value, list) and all(type(item) in (int, float) and 0 <= item <= 1 for item in value)
    if not isinstance(value, list) or not numbers or len(value) != 2:
        raise config.error("bskcn_tv", "two numbers from 0 to 1: a weight for training and one for use")
    return float(value[1])
