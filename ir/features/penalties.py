"""The features of penalties for tokens that a sequence contains already, and of bans of tokens (`min_tokens`)."""

from typing import Any

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array, RequestView
from ingot.ir.features.step_input import RowTable, ServedParam, StepInput, one_of, request_input
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.ir.types import TensorType

_FLOAT, _INT = TensorType(torch.float32, ("L",)), TensorType(torch.int32, ("L",))


def _penalty(name: str, param: str, nothing: float, other: float) -> StepInput:
    """Return the step input `name` for a penalty.

    `param` is the name of the sampling parameter. `nothing` is its value without a penalty. `other` is another value,
    for tests.
    """

    def of(sequence: RequestView) -> Any:
        return getattr(sequence.params, param) if sequence.params.penalizes else None

    return request_input(
        name, _FLOAT, nothing, of, one_of(torch.float32, nothing, other), (ServedParam(param, nothing),)
    )


def _prompt_end(sequence: RequestView) -> int | None:
    return len(sequence.prompt_ids) if sequence.params.penalizes else None


def _count_row(sequence: RequestView) -> int | None:
    return sequence.row if sequence.params.penalizes else None


PENALTIES = Feature(
    "penalties",
    inputs=(
        # The prompt's length, for penalties; -1: the sequence's tokens are not counted.
        request_input("prompt_ends", TensorType(torch.int32, ("B",)), -1, _prompt_end),
        request_input("count_rows", _INT, -1, _count_row),  # the row of state whose counts penalize it; -1: no penalty
        _penalty("repetition", "repetition_penalty", 1.0, 1.3),
        _penalty("frequency", "frequency_penalty", 0.0, 0.2),
        _penalty("presence", "presence_penalty", 0.0, 0.1),
    ),
    rows=(RowState("token_counts", torch.int32, ("vocab",)),),
    before=(OpCall("count_tokens", ("token_counts",), {"ids": "tokens"}),),
)


def _banned_ids(sequence: RequestView) -> list[int] | None:
    """Return the ids of tokens that would end the sequence. They are banned until it has `min_tokens` tokens.

    None if the request sets no `min_tokens`, or has a grammar: then the tokens that the grammar allows say so.
    """
    params = sequence.params
    return sorted(sequence.end_tokens()) if params.min_tokens and params.structured_outputs is None else None


def _unbanned_at(sequence: RequestView) -> int | None:
    least: int = sequence.params.min_tokens
    return min(len(sequence.prompt_ids) + least, sequence.max_total)


def _banned(array: Array, fed: Fed) -> None:
    """Fill the step input `banned` with the ids that must not be sampled, for each row of logits. -1 fills the rest.

    Ids are banned while the row's sequence has fewer tokens than the request's `min_tokens`.
    """
    fed.tables["banned"].take(fed.request_rows, axis=0, out=array, mode="clip")
    array[fed.request_rows < 0] = -1
    if (array >= 0).any():
        totals = fed.totals()
        array[: len(totals)][totals >= fed.tables["unbanned_at"][fed.request_rows[: len(totals)]]] = -1


_BANNED = TensorType(torch.int32, ("L", MAX_BANNED))
BANS = Feature(
    "bans",
    inputs=(
        StepInput(  # tokens that may not be chosen; -1: none
            "banned",
            _BANNED,
            -1,
            _banned,
            varies=True,
            table=RowTable("banned", torch.int32, -1, _banned_ids, MAX_BANNED),
            serves=(ServedParam("min_tokens", 0),),
        ),
    ),
    # With this many tokens, prompt included, a sequence has no bans.
    tables=(RowTable("unbanned_at", torch.int32, 0, _unbanned_at),),
)
