"""The ends of a step by Triton kernels against their references, which they equal bit by bit."""

import pytest
import torch
from odd_samples import odd_samples
from op_values import ints, random_step
from triton_checks import check_lowering
from triton_schedules import TESTED

from ingot.backends.triton.lower.step import LOWERINGS
from ingot.ir.ops import OPS


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs)


@pytest.mark.parametrize("seed", range(20))
def test_feed(seed: int) -> None:
    args, page_size = random_step(seed)
    check_lowering(OPS["feed"], LOWERINGS["feed"], args, {"page_size": page_size})


# A captured step of 8 that three sequences use: all else is padding, of which one sequence has a page table of zeros.
def test_feed_of_a_padded_step() -> None:
    seqs = ints(0, 1, 2, -1, -1, -1, -1, -1)
    rows = ints(4, 0, 2, -1, -1, -1, -1, -1)
    starts = ints(-1, 7, -1, -1, -1, -1, -1, -1)
    table = torch.arange(8 * 5, dtype=torch.int32).view(8, 5)
    tokens, lens = ints(-1, 9, -1, -1, -1, -1, -1, -1), ints(1, 1, 1, 0, 0, 0, 0, 0)
    states = ints(11, 12, 13, 14, 15), ints(0, 1, 2, 3, 16)
    args = (tokens, seqs, ints(*range(8)), lens, rows, starts, table, *states)
    check_lowering(OPS["feed"], LOWERINGS["feed"], args, {"page_size": 4})


# More tokens and sequences than a program takes.
def test_feed_of_many() -> None:
    g = torch.Generator().manual_seed(3)
    count = 300
    seqs = torch.arange(count, dtype=torch.int32)
    starts = torch.randint(-1, 9, (count,), generator=g, dtype=torch.int32)
    table = torch.randint(0, 2**31 - 1, (count, 4), generator=g, dtype=torch.int32)  # slots beyond 32 bits
    args = (seqs - 1, seqs, seqs, torch.ones_like(seqs), seqs.flip(0), starts, table, seqs + 7, seqs % 17)
    check_lowering(OPS["feed"], LOWERINGS["feed"], args, {"page_size": 16})


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_advance(seed: int, rejects: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    sequences, slots = [1, 5, 130][seed % 3], 150

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    rows = torch.randperm(slots, generator=g)[:sequences].int()
    rows[draw(0, 5, sequences) == 0] = -1
    rejected = (draw(0, 4, sequences),) if rejects else ()
    states = draw(0, 99, slots), draw(0, 30, slots)
    args = (*states, rows, draw(4, 50, sequences), draw(-1, 99, 8), draw(-1, 8, sequences), *rejected)
    check_lowering(OPS["advance"], LOWERINGS["advance"], args, {})


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(("count", "width"), [(131, 1), (131, 40), (131, 64), (13, 65), (3, 2500), (1, 64), (1, 2500)])
def test_rows_of_a_table(count: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(width)
    table = torch.randn(57, width + 3, generator=g).to(dtype)
    indices = torch.randint(0, 57, (count,), generator=g, dtype=torch.int32)
    for rows in (table[:, :width], table[:, 3:].contiguous()):
        check_lowering(OPS["embedding"], LOWERINGS["embedding"], (indices, rows), {}, dims={"T": count})
        check_lowering(OPS["select_rows"], LOWERINGS["select_rows"], (rows, indices), {}, dims={"L": count})


def test_rows_of_positions() -> None:
    positions = torch.arange(300, dtype=torch.int32) * 3
    rows = ints(299, 0, 7)
    check_lowering(OPS["select_rows"], LOWERINGS["select_rows"], (positions, rows), {}, dims={"T": 300, "L": 3})
