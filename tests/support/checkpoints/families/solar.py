"""Solar Pro: Llama with a window, and streams that later layers read too (vLLM, model_executor/models/solar.py)."""

import random
from dataclasses import replace
from typing import Any

import random_fields
import torch
from llama_oracle import LlamaOracle
from mutations import Mutation, every, some
from tiny_checkpoint import tiny_like_llama
from tiny_weights import like_llama

from families.family import Config, Family
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.skips import SkipSpec


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return like_llama(config, generator)


class _Oracle(LlamaOracle):
    def layers(self, h: torch.Tensor) -> torch.Tensor:
        config = self.config
        weight = config["bskcn_tv"][1]  # the first is for training
        kept: dict[int, torch.Tensor] = {}
        for index in range(config["num_hidden_layers"]):
            for place in (1, 2):
                if index in config[f"bskcn_{place}"]:
                    kept[place] = h
            for place in (1, 2):
                if index in config[f"bskcn_{place + 2}"]:
                    h = kept[place] * weight + h * (1 - weight)
            layer = f"model.layers.{index}"
            x = self.norm(h, f"{layer}.input_layernorm")
            h = h + self.attention(x, f"{layer}.self_attn", config["num_key_value_heads"], config["sliding_window"])
            x = self.norm(h, f"{layer}.post_attention_layernorm")
            h = h + self.gated(x, f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        return h


def _random(draw: random.Random) -> dict[str, Any]:
    config = random_fields.sizes(draw)
    layers = config["num_hidden_layers"] = draw.randint(1, 6)
    config["rms_norm_eps"] = random_fields.log(draw, 1e-12, 1.0)
    config["sliding_window"] = draw.choice([None, draw.randint(1, 40)])
    config["bskcn_tv"] = [0.9, draw.choice([0.0, 1.0, draw.random()])]
    for place in (1, 2):
        kept = sorted(draw.sample(range(layers), draw.randint(0, layers)))
        later = range(max(1, kept[0]), layers) if kept else range(0)
        config[f"bskcn_{place}"] = kept
        config[f"bskcn_{place + 2}"] = sorted(draw.sample(later, draw.randint(0, len(later))))
    config |= random_fields.flags(draw, "attention_bias", "mlp_bias")
    random_fields.spell_rope(config, random_fields.rope(draw, config, ("default", "linear", "dynamic")), draw)
    return config


FAMILIES = (
    Family(
        "solar",
        "SolarForCausalLM",
        tiny=(
            tiny_like_llama(
                "solar-skips",
                "SolarForCausalLM",
                0,
                hidden_size=66,
                num_hidden_layers=6,
                head_dim=14,
                sliding_window=23,
                bskcn_1=[1, 3],
                bskcn_2=[2],
                bskcn_3=[2, 5],  # the streams before layers 1 and 3
                bskcn_4=[4],
                bskcn_tv=[0.9, 0.7],
                rms_norm_eps=0.016,
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
            **{f"bskcn_{place}": [] for place in (1, 2, 3, 4)},
        },
        bad=(
            ("solar-skips", "bskcn_1", [6]),
            ("solar-skips", "bskcn_2", 2),
            ("solar-skips", "bskcn_3", [0]),
            ("solar-skips", "bskcn_4", [1]),
            ("solar-skips", "bskcn_tv", [0.5]),
            ("solar-skips", "bskcn_tv", [0.5, "half"]),
            ("solar-skips", "sliding_window", -1),
        ),
        oracle=_Oracle,
    ),
)
_SKIPS = some(SkipSpec, lambda skip: True)


def _others(**changes: Any) -> Any:
    """Other values for fields of every skip, which are added to what they are."""
    return lambda dims: replace(
        dims,
        skips=tuple(
            replace(skip, **{name: getattr(skip, name) + more for name, more in changes.items()}) for skip in dims.skips
        ),
    )


MUTATIONS = (
    Mutation("no skips", "DecoderSpec.skips", _SKIPS, every(DecoderSpec, skips=())),
    Mutation("skips from a layer before", "SkipSpec.start", _SKIPS, _others(start=-1)),
    Mutation("skips to a layer before", "SkipSpec.to", _SKIPS, _others(to=-1)),
    Mutation("skips of the weight for training", "SkipSpec.weight", _SKIPS, _others(weight=0.2)),
)
