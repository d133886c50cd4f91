"""MiMo: Qwen 2 with layers that predict further tokens (XiaomiMiMo/MiMo on GitHub, modeling_mimo.py)."""

import random
from collections.abc import Mapping
from typing import Any

import random_fields
import torch
from tiny_checkpoint import tiny_like_llama
from tiny_weights import like_llama

from families.family import Config, Family


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The layers that predict further tokens hold NaN, so that reading them shows."""
    tensors, hidden = like_llama({**config, "model_type": "qwen2"}, generator), config["hidden_size"]
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    for index in range(config.get("num_nextn_predict_layers", 0)):
        layer = f"model.mtp_layers.{index}"
        for name in ("token", "hidden", "final"):
            tensors[f"{layer}.{name}_layernorm.weight"] = torch.full((hidden,), torch.nan)
        tensors[f"{layer}.input_proj.weight"] = torch.full((hidden, 2 * hidden), torch.nan)
        for name, tensor in first.items():
            tensors[name.replace("model.layers.0", layer)] = torch.full_like(tensor, torch.nan)
    return tensors


def _oracle(
    config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
) -> torch.nn.Module:
    """MiMoModel is Qwen2Model with `mtp_layers`, which its forward pass does not call."""
    from hf_model import hf_model  # which imports the families

    qwen2 = {**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    called = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.mtp_layers.")}
    return hf_model(qwen2, called, dtype, max_seq_len)


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["num_nextn_predict_layers"] = draw.randint(0, 2)
    config["use_sliding_window"] = draw.random() < 0.3
    config |= {"sliding_window": draw.randint(1, 40), "max_window_layers": draw.randint(1, 4)}
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "yarn")), draw)
    return config


FAMILIES = (
    Family(
        "mimo",
        "MiMoForCausalLM",
        tiny=(
            tiny_like_llama(
                "mimo-ahead",
                "MiMoForCausalLM",
                0,
                hidden_size=66,
                head_dim=14,
                num_nextn_predict_layers=2,
                attention_bias=True,
                rms_norm_eps=0.016,
                use_sliding_window=False,
                sliding_window=17,
                tie_word_embeddings=False,
            ),
        ),
        weights=_weights,
        random=_random,
        cut={
            "hidden_size": 84,
            "head_dim": 14,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 103,
            "vocab_size": 379,
            "num_hidden_layers": 1,
        },
        bad=(("mimo-ahead", "attention_bias", False),),
        oracle=_oracle,
    ),
)
