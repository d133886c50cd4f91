"""Step3's text part: queries made of a latent, one head of keys and values, stacked experts in listed layers.

The oracle is written from modeling_step3.py, which is published with the model; the division of weights by their sum is
vLLM's (model_executor/models/step3_text.py).
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import expert_weights
import oracle
import random_fields
import torch
from drawn_weights import DrawnWeights
from llama_oracle import LlamaOracle
from mutations import Change, Mutation, Params, always, each, every, some
from tiny_checkpoint import MAX_SEQ_LEN, Tiny, tiny

from families.family import Config, Family
from ingot.models.blocks.attention import QLatentSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.experts import RouterSpec

_TEXT, _PARTS = "Step3TextForCausalLM", "Step3VLForConditionalGeneration"
_ROPES = ("default", "linear", "llama3", "yarn")


def _with_experts(config: Config) -> list[int]:
    listed = config["moe_layers_enum"]
    if listed is None:
        return [*range(1, config["num_hidden_layers"])]
    return [int(index) for index in listed.split(",")] if isinstance(listed, str) else listed


def _rank(config: Config) -> int:
    """Null is the size of a head."""
    return int(config["share_q_dim"] or config["head_dim"])


def _weights(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, head_dim, rank = config["hidden_size"], config["head_dim"], _rank(config)
    drawn, wide, with_experts = DrawnWeights(generator), config["num_attention_heads"] * head_dim, _with_experts(config)
    drawn.matrix("model.embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        drawn.norm(f"{layer}.input_layernorm", hidden)
        drawn.norm(f"{layer}.post_attention_layernorm", hidden)
        for name, rows in (("q", rank), ("k", head_dim), ("v", head_dim)):
            drawn.matrix(f"{layer}.self_attn.{name}_proj", rows, hidden)
        drawn.norm(f"{layer}.self_attn.inter_norm", rank)
        drawn.matrix(f"{layer}.self_attn.wq", wide, rank)
        drawn.matrix(f"{layer}.self_attn.o_proj", hidden, wide)
        if index not in with_experts:
            expert_weights.gated(drawn, f"{layer}.mlp", config["intermediate_size"], hidden)
            continue
        count, width = config["moe_num_experts"], config["moe_intermediate_size"]
        drawn.matrix(f"{layer}.moe.gate", count, hidden)
        for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            drawn.stack(f"{layer}.moe.{name}_proj.weight", count, *shape)
        expert_weights.gated(drawn, f"{layer}.share_expert", config["share_expert_dim"], hidden)
    drawn.norm("model.norm", hidden)
    drawn.matrix("lm_head", config["vocab_size"], hidden)
    return drawn.tensors


def _weights_of_parts(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As published, with tensors of the vision model and of its projector, which hold NaN: reading them shows."""
    others = ("vision_model.embeddings.patch_embedding", "vit_downsampler", "vit_downsampler2", "vit_large_projector")
    unread = {f"{name}.{part}": torch.full((8,), torch.nan) for name in others for part in ("weight", "bias")}
    return {**_weights(config["text_config"], generator), **unread}


class _Oracle(LlamaOracle):
    """Scaled rotary tables start from the context of `max_position_embedding`."""

    def __init__(
        self, config: Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, max_seq_len: int
    ) -> None:
        config = {"rope_theta": 5e5, "norm_expert_weight": False, **config.get("text_config", config)}
        config["max_position_embeddings"] = config["max_position_embedding"]
        super().__init__(config, tensors, dtype, max_seq_len)

    def tied(self) -> bool:
        return False

    def layers(self, h: torch.Tensor) -> torch.Tensor:
        with_experts = _with_experts(self.config)
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            h = h + self.factorized(self.norm(h, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = self.norm(h, f"{layer}.post_attention_layernorm")
            if index in with_experts:
                shared = self.gated(x, f"{layer}.share_expert", "gate_proj", "up_proj", "down_proj")
                h = h + (self.experts(x, f"{layer}.moe") + shared)
            else:
                h = h + self.gated(x, f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        return h

    def factorized(self, x: torch.Tensor, place: str) -> torch.Tensor:
        latent = self.norm(self.linear(x, f"{place}.q_proj"), f"{place}.inter_norm")
        q = self.linear(latent, f"{place}.wq").view(len(x), self.heads, self.head_dim)
        k, v = (self.linear(x, f"{place}.{name}_proj").view(len(x), 1, self.head_dim) for name in "kv")
        q, k = (oracle.rotated(heads, *self.rotation) for heads in (q, k))
        return self.linear(oracle.attention(q, k, v), f"{place}.o_proj")

    def experts(self, x: torch.Tensor, place: str) -> torch.Tensor:
        scores = self.linear(x, f"{place}.gate").float().softmax(-1)
        weights, chosen = scores.topk(self.config["moe_top_k"], -1)
        if self.config["norm_expert_weight"]:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, total = weights.to(x.dtype), torch.zeros_like(x)
        gate, up, down = (self.tensors[f"{place}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        for expert in range(len(gate)):
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            one = x[rows]
            made = (torch.nn.functional.silu(one @ gate[expert].T) * (one @ up[expert].T)) @ down[expert].T
            total = total.index_add(0, rows, made * weights[rows, choice, None])
        return total


def _random(draw: random.Random) -> dict[str, Any]:
    config = expert_weights.sizes(draw, top_k="moe_top_k", experts="moe_num_experts")
    del config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    config |= {
        "tie_word_embeddings": False,
        "max_position_embedding": config.pop("max_position_embeddings"),
        "share_q_dim": draw.choice([None, draw.randint(1, 60), draw.randint(1, 60)]),
        "moe_intermediate_size": draw.randint(1, 60),
        "share_expert_dim": draw.randint(1, 60),
    }
    listed = [index for index in range(layers) if draw.random() < 0.6]
    text = ",".join(map(str, listed or [0]))
    config["moe_layers_enum"] = draw.choice([None, listed, text, f" {text} "])
    random_fields.spell_rope(config, random_fields.rope(draw, config, _ROPES), draw)
    return config | random_fields.flags(draw, "norm_expert_weight")


def _random_parts(draw: random.Random) -> dict[str, Any]:
    text = _random(draw)
    outside = {name: text.pop(name) for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in text}
    return {"text_config": {"model_type": "step3_text", **text}, "vocab_size": text["vocab_size"], **outside}


def _tiny(name: str, seed: int, **fields: Any) -> Tiny:
    own = {
        "hidden_size": 66,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_attention_groups": 1,
        "head_dim": 14,
        "share_q_dim": 26,
        "intermediate_size": 97,
        "moe_num_experts": 5,
        "moe_top_k": 3,
        "moe_intermediate_size": 31,
        "share_expert_dim": 53,
        "max_position_embedding": MAX_SEQ_LEN,
        "rms_norm_eps": 0.016,
        "rope_theta": 811.0,
    }
    return tiny(name, _TEXT, seed, **{**own, **fields})


_LISTED = _tiny(
    "step3_text-listed",
    0,
    moe_layers_enum="1,2",
    norm_expert_weight=False,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 6.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 40,
    },
)
_NORMED = _tiny(
    "step3_text-normed",
    1,
    num_hidden_layers=2,
    moe_layers_enum=None,
    share_q_dim=None,
    norm_expert_weight=True,
    max_position_embedding=40,
    rope_scaling={"rope_type": "yarn", "factor": 6.5, "beta_fast": 0.5, "beta_slow": 0.05},
)
_OUTSIDE = ("architectures", "torch_dtype", "model_type", "norm_expert_weight", "rope_theta", "rope_scaling")
_OF_PARTS = {key: value for key, value in _LISTED.config.items() if key not in _OUTSIDE}
_OF_PARTS |= {"model_type": "step3_text", "moe_layers_enum": [0, 2]}
_CUT = {"hidden_size": 84, "num_hidden_layers": 1, "moe_layers_enum": "0"}
FAMILIES = (
    Family(
        "step3_text",
        _TEXT,
        tiny=(_LISTED, _NORMED),
        weights=_weights,
        random=_random,
        cut=_CUT,
        oracle=_Oracle,
        bad=(
            *(
                ("step3_text-listed", field, value)
                for field, value in (
                    ("moe_layers_enum", ...),
                    ("moe_layers_enum", ""),
                    ("moe_layers_enum", "1,"),
                    ("moe_layers_enum", "1;2"),
                    ("moe_layers_enum", "1,-2"),
                    ("moe_layers_enum", "1,3"),
                    ("moe_layers_enum", "9" * 5000),
                    ("moe_layers_enum", [1, 3]),
                    ("moe_layers_enum", [True]),
                    ("moe_layers_enum", 1),
                    ("num_attention_groups", 2),
                    ("num_key_value_heads", 2),
                    ("share_q_dim", 0),
                    ("share_q_dim", "2048"),
                    ("head_dim", 7),
                    ("moe_top_k", 6),
                    ("moe_num_experts", 0),
                    ("moe_intermediate_size", 0),
                    ("share_expert_dim", 0),
                    ("norm_expert_weight", "no"),
                    ("hidden_act", "gelu"),
                    ("tie_word_embeddings", True),
                    ("partial_rotary_factor", 0.5),
                    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
                    ("max_position_embedding", 0),
                    ("attention_bias", True),
                    ("use_qk_norm", True),
                    ("sliding_window", 128),
                )
            ),
        ),
    ),
    Family(
        "step3_vl",
        _PARTS,
        tiny=(
            replace(
                _LISTED,
                name="step3_vl-parts",
                config={
                    "architectures": [_PARTS],
                    "model_type": "step3_vl",
                    "text_config": _OF_PARTS,
                    "vision_config": {"hidden_size": 8, "image_size": 28},
                    "hidden_size": _OF_PARTS["hidden_size"],
                    "understand_projector_stride": 2,
                    "projector_bias": False,
                    "image_token_id": 378,
                    "vocab_size": 379,
                    "torch_dtype": "float32",
                },
                seed=3,
            ),
        ),
        weights=_weights_of_parts,
        random=_random_parts,
        cut={"text_config": {**_OF_PARTS, **_CUT}, "hidden_size": _CUT["hidden_size"]},
        aliases=("Step3vForConditionalGeneration",),
        oracle=_Oracle,
        bad=(("step3_vl-parts", "text_config", None), ("step3_vl-parts", "text_config", [])),
    ),
)


def _gains_of_one(params: Params, dims: DecoderSpec) -> None:
    for name in [name for name in params if name.endswith("q_latent_norm.weight")]:
        params[name] = torch.ones_like(params[name])


_LATENT = some(QLatentSpec, always)
MUTATIONS = (
    Mutation(
        "a layer norm of q's latent",
        "QLatentSpec.norm",
        _LATENT,
        each(QLatentSpec, lambda one: replace(one, norm=replace(one.norm, kind="layer"))),
    ),
    Mutation("a norm of q's latent without gains", "QLatentSpec.norm", _LATENT, params=_gains_of_one),
    Mutation("sigmoid scores", "RouterSpec.scores", _LATENT, every(RouterSpec, scores="sigmoid")),
)
SIZES: Mapping[str, Change] = {
    "QLatentSpec.rank": each(QLatentSpec, lambda one: replace(one, rank=one.rank + 1)),
}
STORAGE = ("QLatentSpec.up",)
PARTS = ("AttentionSpec.q_latent",)
