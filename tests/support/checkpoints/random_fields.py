"""Fields of random configurations: sizes and constants go to their ends, and so do rotary tables."""

import random
from collections.abc import Mapping
from typing import Any

GELU = ("gelu", "gelu_pytorch_tanh")
# In 16 bits, logits made of two or four numbers err all together, and by chance several times as much as another's.
_LEAST_STREAM = 8


def sizes(draw: random.Random) -> dict[str, Any]:
    """What nearly all families have, by its usual names: sizes, context, tokens, dtype."""
    kv_heads = draw.choice([1, 1, 2, 3, 4])
    heads, head_dim = kv_heads * draw.choice([1, 2, 3, 4]), 2 * draw.randint(1, 16)
    return {
        "hidden_size": draw.randint(_LEAST_STREAM, 150),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw.randint(1, 200),
        "vocab_size": draw.randint(3, 700),
        "max_position_embeddings": draw.choice([32, 100, 160, 4096, 131072]),
        "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **dtype(draw),
    }


def stream_of_heads(draw: random.Random, heads: int) -> int:
    """A hidden size that is a multiple of the heads, and has nothing to do with the size of a head."""
    return heads * draw.randint(-(-_LEAST_STREAM // heads), 30)


def square_sizes(draw: random.Random) -> dict[str, Any]:
    """Those of a family whose heads of q are as wide as the stream; some configurations lack the default epsilon."""
    config = sizes(draw)
    config["hidden_size"] = config["num_attention_heads"] * config.pop("head_dim")
    if draw.random() < 0.8:
        config["rms_norm_eps"] = log(draw, 1e-12, 1.0)
    return config


def dtype(draw: random.Random) -> dict[str, str]:
    """The dtype, in one of its two spellings."""
    return {draw.choice(["dtype", "torch_dtype"]): draw.choice(["float32", "float32", "bfloat16", "float16"])}


def flags(draw: random.Random, *names: str) -> dict[str, bool]:
    """Some of these, on or off."""
    return {name: draw.random() < 0.5 for name in names if draw.random() < 0.7}


def log(draw: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** draw.random())


def rope(draw: random.Random, config: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """A rotary table of one of `kinds`, with its base."""
    kind = draw.choice(kinds)
    table: dict[str, Any] = {"rope_type": kind, "rope_theta": log(draw, 2.0, 1e7)}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
    if kind == "dynamic" and rotary_dim < 4:
        return {**table, "rope_type": "default"}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        table["factor"] = log(draw, 1.0, 40.0)
    if kind in ("llama3", "yarn", "longrope"):
        table["original_max_position_embeddings"] = draw.randint(8, 200)
    if kind == "llama3":
        low = log(draw, 0.3, 4.0)
        table |= {"low_freq_factor": low, "high_freq_factor": low * log(draw, 1.1, 9.0)}
    if kind == "yarn":
        table |= draw.choice([{}, {"beta_fast": 8.0, "beta_slow": 0.7}, {"truncate": False}, {"attention_factor": 1.3}])
        table |= draw.choice([{}, {"mscale": 1.4, "mscale_all_dim": 0.6}])
    if kind == "longrope":
        table |= {
            name: [log(draw, 0.5, 8.0) for _ in range(rotary_dim // 2)] for name in ("short_factor", "long_factor")
        }
        table |= draw.choice([{}, {"factor": 3.5}, {"attention_factor": 1.2}])
    return table


def published_rope(draw: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    """A table as the published code of most families that transformers does not have spells it: the default one, linear
    or dynamic."""
    table = rope(draw, config, ("default", "linear", "dynamic"))
    fields = {"rope_theta": table.pop("rope_theta")}
    if table["rope_type"] != "default":
        fields["rope_scaling"] = {"type": table.pop("rope_type"), **table}
    return fields


def spell_rope(config: dict[str, Any], table: dict[str, Any], draw: random.Random) -> None:
    """Write the table in the new spelling or in the old one."""
    if draw.random() < 0.5:
        config["rope_parameters"] = table
        return
    config["rope_theta"] = table.pop("rope_theta")
    if table["rope_type"] != "default":
        config["rope_scaling"] = table
