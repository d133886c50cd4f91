"""The options of a request for the vector that its tokens are pooled into."""

import torch

from ingot.ir.features.asking import Asking
from ingot.ir.features.feature import Feature
from ingot.ir.features.step_input import asked, one_of
from ingot.ir.types import TensorType

_INTS = TensorType(torch.int32, ("B",))


# The parameters of a request for tokens have neither attribute.
def _dimensions(sequence: Asking) -> int | None:
    return getattr(sequence.params, "dimensions", None)


def _normalize(sequence: Asking) -> int | None:
    return 1 if getattr(sequence.params, "normalize", None) else None


POOLING = Feature(
    "pooling",
    inputs=(
        asked("dimensions", _INTS, 0, _dimensions, one_of(torch.int32, 0, 1, 7)),  # elements to keep; 0: all
        asked("normalize", _INTS, 0, _normalize, one_of(torch.int32, 0, 1)),  # 1: scale the vector to length 1
    ),
)
