"""The ops of LoRA adapters at serving time: two matmuls of low rank, with the factors of the adapter of each token.

The factors of up to `adapters` adapters lie in states, one slot each. The host writes a slot when it loads an adapter.
`slots` i32[T] has the slot of each token's adapter; -1: none.
"""

from collections.abc import Iterator, Sequence

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Effect, Sample, bytes_of, define, wide
from ingot.ir.placements import whole


def _randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g).div(shape[-1] ** 0.5).to(dtype)


def _slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _used(slots: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each slot that tokens use, with bool[T]: which tokens use it."""
    for slot in torch.unique(slots).tolist():
        if slot >= 0:
            yield slot, slots == slot


def _places(slots: torch.Tensor) -> torch.Tensor:
    """Allocate what finding the tokens of an adapter needs: sorted slots, masks and indices of all tokens."""
    return slots.new_empty((8, *slots.shape), dtype=torch.int64)


def _shrink_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, a = _randn(g, dtype, 5, 40), _randn(g, dtype, 3, 16, 40)
    return [
        Sample((x, _slots(2, -1, 0, 2, 0), a)),
        Sample((x[:1], _slots(1), a)),
        Sample((x, _slots(-1, -1, -1, -1, -1), a)),
    ]


def _shrink_fake(x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    if a.dim() != 3 or a.shape[2] != x.shape[-1]:
        raise VerifyError(f"factors {list(a.shape)} for x {list(x.shape)}", expected="a [adapters, R, K]")
    return wide(x).new_empty((x.shape[0], a.shape[1]))


def _shrink_costliest(x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Allocate what a call needs if all tokens use one adapter. The result only has the right shape."""
    rows, factors = x.clone(), wide(a[0])
    held = (_places(slots), rows, factors, wide(rows) @ factors.T, _shrink_fake(x, slots, a))
    return held[-1]


def _shrink_flops(x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor) -> int:
    return 2 * x.numel() * a.shape[1]


def _read_factors(tokens: int, factors: torch.Tensor) -> int:
    """Return the bytes that a call reads of all adapters' factors, for a step of `tokens` tokens.

    It assumes that the tokens use as many different adapters as possible. The factors of each are read once.
    """
    return min(factors.shape[0], tokens) * bytes_of(factors[:1])


@define(
    rows=("x", "slots"),
    samples=_shrink_samples,
    fake=_shrink_fake,
    costliest=_shrink_costliest,
    flops=_shrink_flops,
    traffic=lambda x, slots, a: {"a": _read_factors(x.shape[0], a)},
    effect=Effect.READS_STATE,
    legal="cached",
    fusible=False,
    placement=whole,
    needs_kernel=True,
)
def lora_shrink(x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return `a[slot] @ x` of each token, f32[T, R] (arXiv 2106.09685; for several adapters at once 2310.18547).

    x [T, K], slots i32[T], a [adapters, R, K] in x's dtype. The result of a token without an adapter is zero.
    """
    made = wide(x).new_zeros((x.shape[0], a.shape[1]))
    for slot, tokens in _used(slots):
        made[tokens] = wide(x[tokens]) @ wide(a[slot]).T
    return made


def _expand_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    y, b = _randn(g, dtype, 5, 40), _randn(g, dtype, 3, 40, 8)
    shrunk = torch.randn(5, 16, generator=g)
    if dtype is torch.float64:
        shrunk = shrunk.double()
    return [
        Sample((y, shrunk, _slots(2, -1, 0, 2, 0), b), {"segments": [24, 16]}),
        Sample((y, shrunk[:, :8].contiguous(), _slots(2, -1, 0, 2, 0), b), {"segments": [40]}),
        Sample((y[:1], shrunk[:1], _slots(1), b), {"segments": [1, 39]}),
    ]


def _expand_fake(
    y: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor, b: torch.Tensor, *, segments: Sequence[int]
) -> torch.Tensor:
    parts = len(segments)
    if (
        b.dim() != 3
        or b.shape[1] != y.shape[-1]
        or b.shape[2] * parts != shrunk.shape[1]
        or sum(segments) != b.shape[1]
    ):
        raise VerifyError(
            f"factors {list(b.shape)}, segments {list(segments)}, y {list(y.shape)}, shrunk {list(shrunk.shape)}",
            expected="b [adapters, N, R / segments]",
        )
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _expand_flops(
    y: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor, b: torch.Tensor, *, segments: Sequence[int]
) -> int:
    return 2 * y.numel() * b.shape[2]


def _expand_costliest(
    y: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor, b: torch.Tensor, *, segments: Sequence[int]
) -> torch.Tensor:
    """Allocate what a call needs if all tokens use one adapter. The result only has the right shape."""
    rows, down, factors = y.clone(), shrunk[:, : b.shape[2]].clone(), wide(b[0])
    change = wide(rows) + down @ factors.T
    made = _expand_fake(y, shrunk, slots, b, segments=segments)
    held = (_places(slots), rows, down, factors, change, change.to(y.dtype), made)
    return held[-1]


@define(
    rows=("y", "shrunk", "slots"),
    samples=_expand_samples,
    fake=_expand_fake,
    costliest=_expand_costliest,
    flops=_expand_flops,
    traffic=lambda y, shrunk, slots, b, **_: {"b": _read_factors(y.shape[0], b)},
    effect=Effect.READS_STATE,
    legal="cached",
    fusible=False,
    placement=whole,
    needs_kernel=True,
)
def lora_expand(
    y: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor, b: torch.Tensor, *, segments: Sequence[int]
) -> torch.Tensor:
    """Return `y + b[slot] @ shrunk` of each token, rounded once; y of a token without an adapter.

    y [T, N] is the result of a linear, shrunk f32[T, R * parts] that of `lora_shrink`, slots i32[T],
    b [adapters, N, R]. The columns of y are parts of `segments` columns, one for each linear that was merged. Part i
    reads columns i * R … (i + 1) * R of `shrunk`.
    """
    made, rank = y.clone(memory_format=torch.contiguous_format), b.shape[2]
    for slot, tokens in _used(slots):
        begin = 0
        for part, size in enumerate(segments):
            columns = slice(begin, begin + size)
            change = shrunk[tokens, part * rank : (part + 1) * rank] @ wide(b[slot, columns]).T
            made[tokens, columns] = (wide(y[tokens, columns]) + change).to(y.dtype)
            begin += size
    return made
