"""Rows of the device state `edits`, which holds the logit edits of running sequences.

The executor writes a row before a step if the row is new or its bans changed. Steps without such requests write none.
For a sequence with a grammar, the executor writes the allowed tokens of each step between its two segments.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ingot.ir.features.request_view import Array
from ingot.runtime.params.logit_edits import Pairs
from ingot.runtime.scheduling.request import Request

_STATE = "edits"


@dataclass
class EditedRow:
    """A device row whose sequence has edits, and the bans in its row of `edits`; None: the row is not written yet."""

    request: Request
    bans: Pairs | None = None


@dataclass(frozen=True)
class RowEdit:
    """New contents `values` i32[words] for row `row` of the state `edits`."""

    row: int
    values: Array


class MaskedRow(NamedTuple):
    """A sequence with a grammar in a step, and its device row."""

    request: Request
    row: int


@dataclass(frozen=True)
class MaskRows:
    """The tokens that grammars allow next, for device rows. They replace the allowed tokens in the state `edits`.

    rows    i64[n], the device rows
    words   i32[n, words]: bit v % 32 of word v // 32 is set if token v may be chosen
    """

    rows: torch.Tensor
    words: torch.Tensor


def changed_rows(edited: Mapping[int, EditedRow], sampled: Iterable[Request]) -> tuple[RowEdit, ...]:
    """Return the rows of `edits` to write before a step that samples for the sequences `sampled`, and mark them as
    written. `edited` has the rows of running sequences with edits, by device row."""
    changed: list[RowEdit] = []
    for request in sampled:
        if (one := edited.get(request.row)) is None or request.edits is None:
            continue
        bans = request.edits.bans(request.output_ids, in_flight=request.in_flight > 0)
        if bans != one.bans:
            one.bans = bans
            changed.append(RowEdit(request.row, request.edits.row(bans)))
    return tuple(changed)


def write_edits(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Write the rows in `inputs.edits` to the state `edits`.

    own      the names of the states of the program that is about to run. Do nothing if `edits` is not among them
    states   all states by name
    inputs   the step's inputs; if they are a plain dict of tensors, there is nothing to write
    """
    if _STATE not in own:
        return
    for one in getattr(inputs, "edits", ()):
        values, state = torch.from_numpy(one.values), states[_STATE]
        # Pinned: a copy from other memory would wait for the step that runs.
        state[one.row].copy_(values.pin_memory() if state.is_cuda else values, non_blocking=True)


def write_masks(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Write the masks in `inputs.masks` to the state `edits`, between the forward pass and the ending. The arguments
    are as in `write_edits`."""
    masks: MaskRows | None = getattr(inputs, "masks", None)
    if _STATE not in own or masks is None:
        return
    state = states[_STATE]
    # On a GPU both are pinned, so these copies wait for nothing.
    rows, words = (one.to(state.device, non_blocking=True) for one in (masks.rows, masks.words))
    state[:, : words.shape[1]].index_copy_(0, rows, words)
