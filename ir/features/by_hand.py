"""Build steps and their input tensors outside of serving, for tests, golden runs and numerics checks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import VerifyError
from ingot.ir.features.fed import Fed, PromptLogprobRows
from ingot.ir.features.registry import find_input, row_tables, step_inputs
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import NUMPY_DTYPES


@dataclass(frozen=True)
class FedSequence:
    """One sequence of a step that is built without a scheduler, such as in tests, tuning and golden runs.

    row      its device row: its row in states on the device
    tokens   the ids of its tokens in the step; -1: the token that the device sampled last
    place    the position of its first token in the step
    start    what the step passes to the device as this position: `place`, or -1 if the device has it in a state
    pages    its pages, in the order of positions
    rows     the number of its rows of logits; they belong to its last tokens
    samples  whether a token is sampled from the last of these rows
    params   request values that are not at their defaults, by name of the step input, such as {"temperature": 0.7}
    prompt_logprobs
             (token, count): the step returns the log-probabilities of this token and of the `count` most likely tokens,
             for each of its rows; None: no log-probabilities of prompt tokens
    """

    row: int
    tokens: Sequence[int]
    place: int
    start: int
    pages: Sequence[int] = ()
    rows: int = 1
    samples: bool = True
    params: Mapping[str, float | Sequence[int]] = field(default_factory=dict)
    prompt_logprobs: tuple[int, int] | None = None


def turn_of(group: CacheGroup, pages: int) -> int:
    """Return a number to add to the page numbers of a KV cache group, modulo `pages`, in tests and in `ingot bisect`.

    A sequence then has different pages in each KV cache group. So wrong results show if code uses the page table of
    another group. The number is 0 for the group FULL, which keeps all tokens.
    """
    return 1 + group.lifetime.size % (pages - 1) if group.forgets and pages > 1 else 0


def fed_of(sequences: Sequence[FedSequence], page_size: int, *, width: int | None = None) -> Fed:
    """Return the contents of a step with these sequences. `step_values` makes input tensors from them.

    The page table has `width` pages per sequence. By default it has as many as the sequences need.
    """
    rows = np.array([one.row for one in sequences], np.int32)
    lengths = np.array([len(one.tokens) for one in sequences], np.int32)
    counts = [one.rows for one in sequences]
    ends, last = np.cumsum(lengths), np.cumsum(counts)
    most = max(1, *rows.tolist(), -1) + 1
    wide = max([len(one.pages) for one in sequences] + [1]) if width is None else width
    pages = np.zeros((most, wide), np.int32)
    logit_rows: list[int] = []
    prompt_logprobs: list[PromptLogprobRows] = []
    for one, end in zip(sequences, ends.tolist(), strict=True):
        pages[one.row, : len(one.pages)] = one.pages
        if one.prompt_logprobs is not None:
            prompt_logprobs.append(
                PromptLogprobRows(len(logit_rows), [one.prompt_logprobs[0]] * one.rows, one.prompt_logprobs[1])
            )
        logit_rows += range(end - one.rows, end)
    return Fed(
        rows=rows,
        lengths=lengths,
        starts=np.array([one.start for one in sequences], np.int32),
        tokens=np.array([token for one in sequences for token in one.tokens], np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        sample_index=np.array(
            [end - 1 if one.samples and one.rows else -1 for one, end in zip(sequences, last.tolist(), strict=True)],
            np.int32,
        ),
        request_rows=np.repeat(rows, counts),
        tables=_tables(sequences, most),
        pages=pages,
        page_size=page_size,
        totals=lambda: np.zeros(0, np.int32),  # bans here hold for any length of the sequence
        prompt_logprobs=prompt_logprobs,
        places=np.array([one.place for one in sequences], np.int32),
        # A sequence keeps its state in the slot with the number of its row. A new sequence reads none.
        state_read=np.array([one.row if one.place else -1 for one in sequences], np.int32),
        state_write=rows,
    )


def _tables(sequences: Sequence[FedSequence], rows: int) -> dict[str, Array]:
    tables: dict[str, Array] = {}
    for table in row_tables(step_inputs()):
        shape = rows if table.width is None else (rows, table.width)
        values = tables[table.name] = np.full(shape, table.nothing, NUMPY_DTYPES[table.dtype])
        for one in sequences:
            if table.name in one.params:
                value = one.params[table.name]
                if isinstance(value, Sequence):
                    values[one.row, : len(value)] = value
                else:
                    values[one.row] = value
    return tables


def step_values(names: Iterable[str], fed: Fed) -> dict[str, torch.Tensor]:
    """Return the step inputs `names` as tensors by name. `fed` holds the contents of the step.

    Raises VerifyError for an input that no feature declares. A feature is an ability such as penalties.
    """
    sizes = {"T": len(fed.tokens), "B": len(fed.rows), "L": len(fed.logit_rows), "P": fed.pages.shape[1]}
    sizes["G"] = 1 if fed.sharing is None else len(fed.sharing)
    values: dict[str, torch.Tensor] = {}
    for name in names:
        declared = find_input(name)
        if declared is None:
            raise VerifyError(f"no feature declares the step input '{name}'", expected=", ".join(step_inputs()))
        array = np.empty(declared.type.bind(sizes), NUMPY_DTYPES[declared.type.dtype])
        declared.fill(array, fed)
        values[name] = torch.from_numpy(array)
    return values
