"""Dtypes and random tensors for tests of ops, and the comparison by the table of tolerances."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawn import drawn

from ingot.ir.numerics.tolerances import TOLERANCES, compare
from ingot.ir.ops.logit_edits import EditParts

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FLOATS = tuple(TOLERANCES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert found.dtype == dtype
    problem = compare(found, expected, dtype, factor=factor)
    assert problem is None, problem


def widened(args: Sequence[Any]) -> list[Any]:
    """The arguments of a call in float64. A cache of eight bits stays one: what it rounds is its meaning."""
    return [arg.double() if isinstance(arg, torch.Tensor) and arg.dtype in TOLERANCES else arg for arg in args]


every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
# For many cases that differ by their dtype in roundings alone.
two_dtypes = pytest.mark.parametrize("dtype", drawn(2, FLOATS), ids=str)


def rope_attrs(case: dict[str, Any], rotary_dim: int, theta: float, positions: int) -> dict[str, Any]:
    renamed = {"original_max_position_embeddings": "original_max_position"}
    scaling = {renamed.get(name, name): value for name, value in case.items()}
    return {"kind": "rope", "positions": positions, "rotary_dim": rotary_dim, "theta": theta, **scaling}


def random_step(seed: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """Arguments of `feed`, with padding, decode rows and prefill rows mixed."""
    g = generator(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    page_size, slots, sequences = [1, 4, 16][seed % 3], 9, pick(1, 5)
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    tokens: list[int] = []
    seqs: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    begins: list[int] = []
    for b in range(sequences):
        starts.append(len(tokens))
        if pick(0, 4) == 0:  # a padding sequence
            rows[b] = -1
            lens.append(0)
            begins.append(-1)
            continue
        decode = pick(0, 2) == 0
        length = 1 if decode else pick(1, 7)
        lens.append(length)
        begins.append(-1 if decode else pick(0, 12))
        tokens += [-1] if decode else [pick(0, 99) for _ in range(length)]
        seqs += [b] * length
    padding = pick(0, 3)
    tokens += [pick(-1, 99) for _ in range(padding)] or ([-1] if not tokens else [])
    seqs += [-1] * (len(tokens) - len(seqs))
    table = torch.randint(0, 50, (sequences, 24), generator=g, dtype=torch.int32)
    last, position = (torch.randint(0, 12, (slots,), generator=g, dtype=torch.int32) for _ in range(2))
    return (
        (ints(*tokens), ints(*seqs), ints(*starts), ints(*lens), rows, ints(*begins), table, last, position),
        page_size,
    )


def no_penalties(rows: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """The last arguments of `sample` where no row asks for a penalty, a ban or edits. Those of others would show."""
    counts, columns = torch.full((2, vocab), 5, dtype=torch.int32), torch.full((3, rows), 7.0)
    no_row = torch.full((rows,), -1, dtype=torch.int32)
    edits = torch.zeros(2, EditParts(vocab).words, dtype=torch.int32)  # which would allow no token
    return (counts, no_row, *columns, no_row[:, None].expand(rows, 3).contiguous(), edits, no_row, ints(0, 0))
