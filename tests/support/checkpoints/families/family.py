"""What tests know of a family whose tensors or fields have names of their own."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny_checkpoint import Tiny, Weights

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family, by the `model_type` of its config.json.

    tiny        checkpoints, in which every constant is far from its default
    weights     every tensor of a checkpoint, in its own names, written apart from Ingot's reader
    random      fields of a random config.json, sizes to their ends; architecture and model type are added
    cut         sizes of the cut to one layer, such that all cuts share executables
    aliases     other names of the architecture, which read the same
    optional    fields that a config.json may lack, of this family or another that has them
    own_optional
                fields that a config.json may lack in this family, and not in others
    bad         (checkpoint, field, value) that reading refuses by the field's name
    oracle      the model, (config, tensors, dtype, max_seq_len) -> a module that gives `.logits` [1, n, vocab] for ids
                [1, n], where transformers has no class
    renamed     what transformers calls modules whose names in checkpoints are others
    restored    the tensors as transformers holds them, where it stacks those of a checkpoint
    """

    model_type: str
    architecture: str
    tiny: tuple[Tiny, ...]
    weights: Weights
    random: Callable[[random.Random], dict[str, Any]]
    cut: Config
    aliases: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    own_optional: frozenset[str] = frozenset()
    bad: tuple[tuple[str, str, Any], ...] = ()
    oracle: Callable[[Config, Mapping[str, torch.Tensor], torch.dtype, int], torch.nn.Module] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    restored: Callable[[Config, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None

    @property
    def architectures(self) -> frozenset[str]:
        return frozenset({self.architecture, *self.aliases, *(tiny.config["architectures"][0] for tiny in self.tiny)})

    @property
    def checkpoints(self) -> tuple[Tiny, ...]:
        return tuple(replace(tiny, weights=self.weights) for tiny in self.tiny)
