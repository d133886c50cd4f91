"""The feature that returns log-probabilities of sampled tokens, of the most likely ones, and of prompt tokens."""

import numpy as np
import torch

from ingot.ir.features.feature import Feature
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array, RequestView
from ingot.ir.features.step_input import RowTable, ServedParam, StepInput, one_of
from ingot.ir.types import TensorType

_INT = TensorType(torch.int32, ("L",))


def _num_logprobs(sequence: RequestView) -> int | None:
    count: int | None = sequence.params.logprobs
    return count


def _targets(array: Array, fed: Fed) -> None:
    array[:] = -1
    for one in fed.prompt_logprobs:
        array[one.first : one.first + len(one.targets)] = one.targets


def _counts(array: Array, fed: Fed) -> None:
    np.take(fed.tables["num_logprobs"], fed.request_rows, axis=0, out=array, mode="clip")
    if fed.has_idle_rows:
        array[fed.request_rows < 0] = -1
    for one in fed.prompt_logprobs:
        array[one.first : one.first + len(one.targets)] = one.num_logprobs


LOGPROBS = Feature(
    "logprobs",
    inputs=(
        # The token to score; -1: the sampled one.
        StepInput("targets", _INT, -1, _targets, draw=one_of(torch.int32, -1, 7)),
        # The number of most likely tokens to list with it; -1: no log-probabilities.
        StepInput(
            "num_logprobs",
            _INT,
            -1,
            _counts,
            table=RowTable("num_logprobs", torch.int32, -1, _num_logprobs),
            serves=(ServedParam("logprobs", None), ServedParam("prompt_logprobs", None)),
            draw=one_of(torch.int32, -1, 0, 5),
        ),
    ),
)
