"""The cpu backend's ends of a step against the references, on random steps with padding in every place."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from drawn_edits import drawn_edits
from op_values import no_penalties

from ingot.ir.ops import OPS

pytestmark = pytest.mark.xdist_group("cpu-kernels")

Library = Mapping[str, Callable[..., Any]]


def ints(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(30))
def test_feed(seed: int, library: Library) -> None:
    g = torch.Generator().manual_seed(seed)
    sequences, slots, page = int(ints(g, 1, 6, 1)), 9, int(ints(g, 1, 20, 1))
    q_lens = ints(g, 1, 5, sequences)
    q_starts = (q_lens.cumsum(0) - q_lens).int()
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    rows[ints(g, 0, 5, sequences) == 0] = -1
    token_seqs = torch.cat([torch.arange(sequences).repeat_interleave(q_lens), torch.tensor([-1, -1])]).int()
    tokens = ints(g, -1, 99, len(token_seqs))
    starts = ints(g, -1, 30, sequences)
    position, last_token = ints(g, 0, 30, slots), ints(g, -1, 99, slots)
    table = ints(g, 0, 1000, sequences, -(-40 // page))
    args = (tokens, token_seqs, q_starts, q_lens, rows, starts, table, last_token, position)
    found = library["ingot.feed"](*args, page_size=page)
    for one, expected in zip(found, OPS["feed"].reference(*args, page_size=page), strict=True):
        assert one.dtype == expected.dtype and torch.equal(one, expected)


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_advance(seed: int, rejects: bool, library: Library) -> None:
    g = torch.Generator().manual_seed(seed)
    sequences, slots = int(ints(g, 1, 6, 1)), 9
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    rows[ints(g, 0, 5, sequences) == 0] = -1
    sampled, sample_index = ints(g, -1, 99, 8), ints(g, -1, 8, sequences)
    rejected = (ints(g, 0, 4, sequences),) if rejects else ()
    args = (rows, ints(g, 1, 50, sequences), sampled, sample_index, *rejected)
    states = (ints(g, 0, 99, slots), ints(g, 0, 30, slots))
    found, expected = ([state.clone() for state in states] for _ in range(2))
    library["ingot.advance"](*found, *args)
    in_place = OPS["advance"].in_place
    assert in_place is not None
    in_place(*expected, *args)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("vocab", [1, 7, 64, 4099])
@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("asked", ["nothing", "draws", "penalties", "bans", "edits"])
def test_sample(rows: int, vocab: int, asked: str, library: Library) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (rows, vocab), generator=g).float()  # many equals
    for row, value in ((1, NAN), (2, INF), (3, -INF)):
        if row < rows:
            logits[row, int(ints(g, 0, vocab, 1))] = value
    if rows > 4:
        logits[4] = -INF
    temperature = torch.zeros(rows)
    if asked == "draws":
        temperature[rows // 2] = 0.7
    columns = (torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows), torch.ones(rows))
    keys = (torch.arange(rows), torch.arange(rows, dtype=torch.int32))
    args = [logits, temperature, *columns, *keys, *no_penalties(rows, vocab)]
    if asked == "penalties":
        args[9] = ints(g, -1, 2, rows)  # count_rows
    if asked == "bans":
        args[13] = ints(g, -1, vocab, rows, 3)
    if asked == "edits":
        edits, last_token = drawn_edits(g, vocab, [0, 0])
        args[-3:] = edits, ints(g, -1, 2, rows), last_token
    found = library["ingot.sample"](*args)
    assert found.dtype == torch.int32 and torch.equal(found, OPS["sample"].reference(*args))
