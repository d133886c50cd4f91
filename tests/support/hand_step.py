"""A step written by hand: greedy, any tokens of any sequences, with any rows of logits."""

from collections.abc import Sequence

import torch

from ingot.runtime.batch import NOTHING_ASKED
from ingot.runtime.step import StepBuffer, StepInputs, StepSizes

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
    lengths = [len(tokens) for tokens in fed]
    ends = torch.tensor(lengths).cumsum(0)
    total = sum(lengths)
    logit_rows = list(range(total)) if every_row else (ends - 1).tolist()
    sizes = StepSizes(total, len(fed), len(logit_rows), max(map(len, tables)))
    inputs = StepBuffer(sizes).views(sizes)
    values = {
        "tokens": [token for tokens in fed for token in tokens],
        "token_seqs": [b for b, length in enumerate(lengths) for _ in range(length)],
        "q_starts": (ends - torch.tensor(lengths)).tolist(),
        "q_lens": lengths,
        "rows": list(rows),
        "starts": list(starts),
        "sample_index": [logit_rows.index(int(end) - 1) for end in ends],
        "state_read": [-1 if start == 0 else row for start, row in zip(starts, rows, strict=True)]
        if read is None
        else read,
        "state_write": list(rows) if write is None else write,
        "page_table": [[*table, *[0] * (sizes.P - len(table))] for table in tables],
        "logit_rows": logit_rows,
    }
    for name, value in values.items():
        inputs[name].copy_(torch.tensor(value))
    for name, nothing in {**NOTHING_ASKED, "prompt_ends": -1}.items():
        inputs[name].fill_(nothing)
    return inputs
