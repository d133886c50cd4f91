"""Probabilities of classes from the logits that a model pools."""

import math
from array import array
from collections.abc import Sequence

import msgspec

from ingot.serve.engine.messages import Vector
from ingot.serve.engine.vector_values import vector_bytes, vector_values


def probabilities(logits: Sequence[float]) -> list[float]:
    """Return the probabilities of classes: the softmax of their logits, or for a single class the sigmoid."""
    if len(logits) == 1:
        return [_sigmoid(logits[0])]
    most = max(logits)
    powers = [math.exp(one - most) for one in logits]
    total = math.fsum(powers)
    return [one / total for one in powers]


def as_probabilities(vector: Vector) -> Vector:
    """Return a vector of logits as one of probabilities, in float32."""
    return msgspec.structs.replace(vector, values=vector_bytes(array("f", probabilities(vector_values(vector)))))


def _sigmoid(logit: float) -> float:
    """Return the logistic function of a logit, without an overflow for any logit."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
