"""The op of pooling: one vector (embedding) per sequence of a step, from the hidden states of its tokens."""

from typing import Any

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define, wide, wide_copy
from ingot.ir.placements import whole

# The hidden states that make the vector: the last token's, the mean of all, the first token's. Names are those of
# vLLM's pooling types (`CLS` is the first token).
POOLINGS = ("last", "mean", "cls")
# The least divisor of a vector, so that a zero vector stays zero; the same as in torch's `normalize`.
LEAST_NORM = 1e-12


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return sample calls with sequences of 5, 0 and 1 tokens, and with two tokens of no sequence."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    x = torch.randn(8, 24, generator=g).to(dtype)
    asked = ((ints(0, 0, 0), ints(0, 0, 0)), (ints(7, 0, 24), ints(1, 1, 0)))
    return [
        Sample((x, ints(0, 0, 5), ints(5, 0, 1), *one), {"pooling": pooling}) for pooling in POOLINGS for one in asked
    ]


def check_pooling(pooling: str) -> None:
    """Raise VerifyError unless `pooling` is "last", "mean" or "cls"."""
    if pooling not in POOLINGS:
        raise VerifyError(f"unknown pooling '{pooling:.80}'", expected=", ".join(POOLINGS))


def _fake(x: torch.Tensor, q_starts: torch.Tensor, *_: object, pooling: str) -> torch.Tensor:
    check_pooling(pooling)
    return torch.empty(q_starts.shape[0], x.shape[1], dtype=wide(x[:0]).dtype, device=x.device)


def _costliest(x: torch.Tensor, q_starts: torch.Tensor, *rest: torch.Tensor, pooling: str) -> torch.Tensor:
    """Allocate the most memory that a call of `pool` can need. The memory planner measures it.

    The worst case is that all tokens belong to one sequence. The result only has the right shape.
    """
    out = _fake(x, q_starts, *rest, pooling=pooling)
    own = wide_copy(x)
    out[0] = own.mean(0)
    return out


@define(
    samples=_samples,
    fake=_fake,
    flops=lambda x, *_, **__: x.numel(),
    costliest=_costliest,
    fusible=False,
    legal="cached",
    placement=whole,
)
def pool(
    x: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    *,
    pooling: str,
) -> torch.Tensor:
    """Return one vector per sequence, f32[B, N], from the hidden states x [T, N] of its tokens.

    `pooling` is "last" (the last token's hidden state), "cls" (the first token's) or "mean" (the mean of all). Tokens
    `q_starts[b]` to `q_starts[b] + q_lens[b]` belong to sequence b. A sequence without tokens gets zeros.
    `dimensions[b]` is the number of leading elements to keep. The rest becomes zero (arXiv 2205.13147). 0 keeps all. If
    `normalize[b]` is not 0, the vector is then scaled to length 1. Raises VerifyError for an unknown pooling.
    """
    check_pooling(pooling)
    rows: list[torch.Tensor] = []
    asked: list[Any] = [one.tolist() for one in (q_starts, q_lens, dimensions, normalize)]
    for start, count, kept, unit in zip(*asked, strict=True):
        end = start + count
        if not count:
            rows.append(torch.zeros_like(wide_copy(x[:1])))
            continue
        # Copy the rows, so that the tokens' address in the step cannot change a bit.
        first, last = {"last": (end - 1, end), "mean": (start, end), "cls": (start, start + 1)}[pooling]
        row = wide_copy(x[first:last]).mean(0, keepdim=True)
        if kept:
            row[:, kept:] = 0
        rows.append(row / row.norm().clamp(min=LEAST_NORM) if unit else row)
    return torch.cat(rows)
