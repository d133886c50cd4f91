"""Tiny checkpoints whose sizes divide over a mesh, by what they show of sharding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from staged import LIMITS
from tiny import TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import trace
from ingot.ir.program import Model
from ingot.models.architectures import read_spec


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint with some fields of its config changed, on a mesh of `tp` ranks."""

    checkpoint: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 2
    slow: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        return {"tp": self.tp}

    def open(self, folder: Any) -> tuple[Model, Callable[[str], torch.Tensor]]:
        """The traced model, and what reads its checkpoint, which is written into `folder`."""
        return open_model(TINY[self.checkpoint].write(folder / self.checkpoint, **self.changes))


def open_model(folder: Any) -> tuple[Model, Callable[[str], torch.Tensor]]:
    """The traced model of a checkpoint, and what reads its tensors."""
    found = Checkpoint.open(folder)
    stored = {name: info.dtype for name, info in found.tensors.items()}
    return trace(read_spec(found.config), LIMITS, stored), found.read


CASES: Mapping[str, Case] = {
    "key-value groups": Case("llama-scaled", {"num_hidden_layers": 2, "intermediate_size": 100, "vocab_size": 366}),
    # Three heads of k and v for two ranks; a tied head; biases everywhere.
    "repeated key-value heads and biases": Case(
        "llama-biased", {"num_hidden_layers": 1, "intermediate_size": 132, "vocab_size": 402}
    ),
    # A vocabulary that does not divide.
    "q and k norms": Case("qwen3-scaled", {"num_hidden_layers": 2, "intermediate_size": 108}),
    # One norm over all heads of a token: q and k are gathered for it and taken apart again.
    "norms over all heads": Case("olmo2-biased", {"num_hidden_layers": 1, "intermediate_size": 104}),
    # Gains of their own for each head, repeated with the heads; attention and MLP beside each other.
    "norms by head": Case("cohere-normed", {"num_hidden_layers": 1, "intermediate_size": 105, "vocab_size": 378}, tp=3),
    # Every rank has all latents and its own heads.
    "latents for all heads": Case(
        "deepseek_v2-groups",
        {"num_hidden_layers": 2, "intermediate_size": 104, "moe_intermediate_size": 32, "vocab_size": 380},
    ),
    # Every rank has whole indexers, and makes the same choice.
    "chosen positions": Case(
        "deepseek_v32-few",
        {"num_hidden_layers": 1, "intermediate_size": 104, "moe_intermediate_size": 32, "vocab_size": 380},
    ),
    # Each rank adds its part of what these experts return.
    "experts that return their input": Case(
        "longcat_flash-plain",
        {"num_layers": 1, "ffn_hidden_size": 54, "expert_ffn_hidden_size": 32, "vocab_size": 380},
    ),
    # Every rank has the whole latent of q and the one head of k and v.
    "a latent of queries": Case(
        "step3_text-listed",
        {"num_hidden_layers": 2, "moe_layers_enum": "1", "intermediate_size": 104, "vocab_size": 380}
        | {"moe_intermediate_size": 32, "share_expert_dim": 54},
    ),
    "one key-value head on four ranks": Case(
        "llama-plain", {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 116}, tp=4, slow=True
    ),
    "transposed in the checkpoint": Case("gpt2-tied", {"n_layer": 1, "vocab_size": 212}, slow=True),
    "a head with a bias": Case(
        "phi-normed", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "slopes of positions": Case("bloom-tied", {"n_layer": 1}, slow=True),
    "several streams and shared caches": Case(
        "gemma3n_text-shared",
        {"intermediate_size": 104, "vocab_size": 380, "vocab_size_per_layer_input": 376, "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.8, 0.0, 0.3, 0.0]}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        slow=True,
    ),
    "a narrower table of tokens": Case(
        "opt-after", {"num_hidden_layers": 1, "ffn_dim": 104, "vocab_size": 380}, slow=True
    ),
    "norms without gains and limits": Case(
        "olmo-clipped", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "merged head by head": Case(
        "persimmon-normed", {"num_hidden_layers": 1, "intermediate_size": 105, "vocab_size": 378}, tp=3, slow=True
    ),
    "plain parts without biases": Case(
        "nemotron-wide", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "merged in the checkpoint": Case("phi3-long", {"intermediate_size": 104}, slow=True),
    "merged by groups in the checkpoint": Case(
        "internlm2-dynamic", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "rows of unit length in the head": Case(
        "baichuan-alibi", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "keys and values in turns": Case(
        "telechat2-grown", {"n_layer": 1, "ffn_hidden_size": 104, "vocab_size": 380}, slow=True
    ),
    "merged by groups, in parallel": Case(
        "falcon-new", {"num_hidden_layers": 1, "ffn_hidden_size": 104, "vocab_size": 380}, slow=True
    ),
    "merged with one key-value head": Case(
        "falcon-query", {"num_hidden_layers": 1, "ffn_hidden_size": 104, "vocab_size": 380}, slow=True
    ),
    "merged by heads, in parallel": Case(
        "gpt_neox-parallel", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "norms by head, stored apart": Case(
        "stablelm-normed", {"num_hidden_layers": 1, "intermediate_size": 105, "vocab_size": 381}, tp=3, slow=True
    ),
    "merged by blocks in another order": Case(
        "codegen-blocks", {"n_layer": 1, "n_inner": 104, "vocab_size": 380}, slow=True
    ),
    "soft caps and windows": Case("gemma2-capped", {"intermediate_size": 104, "vocab_size": 380}, slow=True),
    "a scaled stream": Case("granite-scaled", {"intermediate_size": 104, "vocab_size": 380}, slow=True),
    "merged halves and norms after blocks": Case(
        "glm4-posts", {"num_hidden_layers": 1, "intermediate_size": 104, "vocab_size": 380}, slow=True
    ),
    "norms after rotation": Case("hunyuan-biased", {"num_hidden_layers": 1, "intermediate_size": 104}, slow=True),
    "streams of earlier layers": Case("solar-skips", {"intermediate_size": 104, "vocab_size": 380}, slow=True),
    # Linear maps that every rank has whole, and layers without attention, or without anything.
    "layers of other parts": Case("nemotron_nas-late", {"vocab_size": 380}, slow=True),
    "key-value heads by layer": Case("decilm-heads", {"intermediate_size": 104}, slow=True),
    "layers without rotation": Case("smollm3-nope", {"intermediate_size": 104, "vocab_size": 380}, slow=True),
}
