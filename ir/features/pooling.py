"""The feature of pooling: a request's options for the vector (embedding) that its tokens are pooled into."""

import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.request_view import RequestView
from ingot.ir.features.step_input import one_of, request_input
from ingot.ir.types import TensorType

_INTS = TensorType(torch.int32, ("B",))


# The parameters of a request for tokens have neither attribute.
def _dimensions(sequence: RequestView) -> int | None:
    return getattr(sequence.params, "dimensions", None)


def _normalize(sequence: RequestView) -> int | None:
    return 1 if getattr(sequence.params, "normalize", None) else None


POOLING = Feature(
    "pooling",
    inputs=(
        request_input("dimensions", _INTS, 0, _dimensions, one_of(torch.int32, 0, 1, 7)),  # elements to keep; 0: all
        request_input("normalize", _INTS, 0, _normalize, one_of(torch.int32, 0, 1)),  # 1: scale the vector to length 1
    ),
)
