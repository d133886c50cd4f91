"""A step written by hand: greedy, any tokens of any sequences, with any rows of logits."""

from collections.abc import Sequence

import numpy as np

from ingot.ir.features import FedSequence, fed_of
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes, filled

ON_DEVICE = -1  # a token or a start that the device takes from the sequence's row


def hand_step(
    fed: Sequence[Sequence[int]],
    starts: Sequence[int],
    rows: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    every_row: bool = False,
    read: Sequence[int] | None = None,
    write: Sequence[int] | None = None,
) -> StepInputs:
    """Sequence b feeds the tokens `fed[b]`, the first at position `starts[b]`; it has device row `rows[b]` and the
    pages `tables[b]`. With `every_row` each token gets a row of logits, else the last one of each sequence.

    Per-sequence state is read from the slots `read` and written to `write`: by default the slot of the row, and for a
    sequence that starts at 0 none to read.
    """
    sequences = [
        FedSequence(row, tokens, start, start, pages, rows=len(tokens) if every_row else 1)
        for row, tokens, start, pages in zip(rows, fed, starts, tables, strict=True)
    ]
    total = sum(map(len, fed))
    sizes = StepSizes(total, len(fed), total if every_row else len(fed), max(map(len, tables)))
    inputs = filled(StepLayout.usual(), fed_of(sequences, 1), sizes)
    for name, slots in (("state_read", read), ("state_write", write)):
        if slots is not None:
            inputs.arrays[name][:] = np.array(slots)
    return inputs
