"""The feature of sampling: the step inputs that say how to choose a token from a row of logits."""

from typing import Any

import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.request_view import RequestView
from ingot.ir.features.step_input import ServedParam, one_of, request_input
from ingot.ir.types import TensorType

_FLOAT, _INT, _LONG = (TensorType(dtype, ("L",)) for dtype in (torch.float32, torch.int32, torch.int64))
# Seeds have 63 bits; drawn seeds should use more than 32 of them.
_SEED_BITS = 40


def _drawn(name: str) -> Any:
    """Return a function that reads the sampling parameter `name` of a sequence.

    The function returns None for a greedy sequence, which ignores such parameters.
    """
    return lambda sequence: None if sequence.params.greedy else getattr(sequence.params, name)


def _serves(name: str, nothing: float | None) -> tuple[ServedParam, ...]:
    return (ServedParam(name, nothing, lambda params: not params.greedy),)


def _seed(sequence: RequestView) -> int:
    return sequence.seed


def _draw_seeds(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1 << _SEED_BITS, (rows,), generator=generator)


SAMPLING = Feature(
    "sampling",
    inputs=(
        # Random numbers are keyed by (seed, position).
        request_input("seeds", _LONG, 0, _seed, _draw_seeds, _serves("seed", None)),
        request_input(  # 0: greedy
            "temperature",
            _FLOAT,
            0.0,
            _drawn("temperature"),
            one_of(torch.float32, 0.0, 0.7, 1.3),
            _serves("temperature", 0.0),
        ),
        request_input("top_k", _INT, 0, _drawn("top_k"), one_of(torch.int32, 0, 5), _serves("top_k", 0)),  # 0: off
        request_input("top_p", _FLOAT, 1.0, _drawn("top_p"), one_of(torch.float32, 1.0, 0.9), _serves("top_p", 1.0)),
        request_input("min_p", _FLOAT, 0.0, _drawn("min_p"), one_of(torch.float32, 0.0, 0.05), _serves("min_p", 0.0)),
        request_input(
            "typical_p",
            _FLOAT,
            1.0,
            _drawn("typical_p"),
            one_of(torch.float32, 1.0, 0.6),
            _serves("typical_p", 1.0),
        ),
    ),
)
