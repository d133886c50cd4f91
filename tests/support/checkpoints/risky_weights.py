"""Tiny checkpoints with weights that make a fusion risky, and with large weights that do not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

Change = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Risky:
    """A tiny checkpoint by name, the change of its tensors, and the risk that the check must find: its part, the stored
    tensors that may be named as its cause, and the passes that may have it."""

    checkpoint: str
    change: Change
    part: str
    tensors: frozenset[str]
    passes: frozenset[str]

    def write(self, folder: Path) -> Path:
        """Write the checkpoint with its tensors changed."""
        TINY[self.checkpoint].write(folder)
        for file in folder.glob("*.safetensors"):
            tensors = {name: self.change(name, one.clone()) for name, one in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
        return folder


def scaled(factors: Mapping[str, float]) -> Change:
    return lambda name, one: one * factors.get(name, 1.0)


def filled(values: Mapping[str, float]) -> Change:
    return lambda name, one: torch.full_like(one, values[name]) if name in values else one


def one_element(tensor: str, value: float) -> Change:
    """Set element 3 of a vector."""

    def change(name: str, one: torch.Tensor) -> torch.Tensor:
        if name == tensor:
            one[3] = value
        return one

    return change


def cancelling(gain: str, matrices: Mapping[str, float], large: float = 1.0) -> Change:
    """Make two channels of the hidden states equal, multiply their gains in the norm `gain` by `large`, and give the
    matrices opposite weights for them, of the size in `matrices`. The two terms of a sum cancel."""

    def change(name: str, one: torch.Tensor) -> torch.Tensor:
        if name == "model.embed_tokens.weight":
            one[:, 4] = one[:, 3]
        if name == gain:
            one[3:5] = one[3] * large
        if name in matrices:
            one[:, 3] *= matrices[name] / one[:, 3].abs()
            one[:, 4] = -one[:, 3]
        return one

    return change


def _layers(tensor: str, values: Mapping[int, float]) -> dict[str, float]:
    return {f"model.layers.{layer}.{tensor}": value for layer, value in values.items()}


BEFORE_ATTENTION = "model.layers.1.input_layernorm.weight"
BEFORE_FEED_FORWARD, FINAL = "model.layers.2.post_attention_layernorm.weight", "model.norm.weight"
Q_K_V = {f"model.layers.1.self_attn.{one}_proj.weight": 0.3 for one in "qkv"}
GATE, UP, HEAD = "model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"
_MERGED = frozenset({"merge-linears", "form-regions"})


def _planted(part: str, tensor: str, change: Change) -> Risky:
    passes = _MERGED if part != "logits" else frozenset({"form-regions"})
    return Risky("llama-plain", change, part, frozenset({tensor}), passes)


RISKY: Mapping[str, Risky] = {
    "gains before attention": _planted("attention", BEFORE_ATTENTION, cancelling(BEFORE_ATTENTION, Q_K_V, 1e5)),
    "gains before feed-forward": _planted(
        "feed-forward", BEFORE_FEED_FORWARD, cancelling(BEFORE_FEED_FORWARD, {GATE: 0.3, UP: 0.3}, 1e5)
    ),
    "gains before the head": _planted("logits", FINAL, cancelling(FINAL, {HEAD: 0.3}, 1e5)),
    "columns of the gate": _planted("feed-forward", GATE, cancelling(BEFORE_FEED_FORWARD, {GATE: 1e4})),
    "columns of the head": _planted("logits", HEAD, cancelling(FINAL, {HEAD: 1e4})),
}
# Weights as large as published ones, or larger, with which every fusion keeps the contract. One K gain of Qwen3-0.6B is
# 96.5; Qwen2.5 has K biases of some hundreds.
LARGE: Mapping[str, Risky] = {
    name: Risky(checkpoint, change, "", frozenset(), frozenset())
    for name, checkpoint, change in (
        ("one K gain of 96.5", "qwen3-plain", one_element("model.layers.1.self_attn.k_norm.weight", 96.5)),
        (
            "all K gains times 100",
            "qwen3-plain",
            scaled(_layers("self_attn.k_norm.weight", dict.fromkeys(range(3), 100.0))),
        ),
        ("all K biases 300", "llama-biased", filled(_layers("self_attn.k_proj.bias", dict.fromkeys(range(3), 300.0)))),
    )
}
