"""Collectives: ops that the ranks of a mesh axis compute together. A collective names an axis, never a rank.

`Op.across` defines each: it maps the arguments of all ranks of the axis, in order, to the results of all ranks. A
collective has no reference for a single rank. Its attribute `parts` is the size of the axis, on which shapes depend.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.ops.registry import Sample, define, rows_bytes, wide
from ingot.ir.ops.stand_ins import part_of_symbol, rows_of_part
from ingot.ir.placements import Call, Fit, Rule, whole

Ranks = list[torch.Tensor]


def _alone(name: str, axis: str) -> InternalError:
    return InternalError(
        f"collective '{name}' over axis '{axis}' was called by one rank alone",
        expected="all ranks of the axis together",
        hint="run the program with interpret_ranks, or serve it, with a process for each rank",
    )


def _samples(**attrs: Any) -> Callable[[torch.Generator, torch.dtype], list[Sample]]:
    def samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        return [Sample((torch.randn(3, 8, generator=g).to(dtype),), {"axis": "tp", **attrs})]

    return samples


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return torch.empty((*x.shape[:dim], size, *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)


def _divided(x: torch.Tensor, dim: int, parts: int) -> int:
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} does not split into {parts} parts")
    return x.shape[dim] // parts


def _each(x: torch.Tensor, dim: int, parts: int) -> int:
    """Return the size of a part along `dim`. Rows (dim 0) need not divide: `own_part` pads them."""
    return rows_of_part(x.shape[0], parts) if dim == 0 else _divided(x, dim, parts)


def _part_fake(x: torch.Tensor, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    return _resized(x, dim, part_of_symbol(x.shape[0], parts) if dim == 0 else _divided(x, dim, parts))


def own_part(x: torch.Tensor, place: int, parts: int, dim: int) -> torch.Tensor:
    """Return a row-major copy of the part of x along `dim` that belongs to the rank with index `place`.

    All `parts` ranks have parts of one size. If the rows (dim 0) do not divide, rows of zeros follow the last one.
    """
    each, size = _each(x, dim, parts), x.shape[dim]
    begin, end = min(place * each, size), min((place + 1) * each, size)
    part = x.narrow(dim, begin, end - begin)
    if end - begin == each:
        return part.clone(memory_format=torch.contiguous_format)
    padded = x.new_zeros((*x.shape[:dim], each, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, end - begin).copy_(part)
    return padded


def in_parts(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """Return the parts of x along `dim` of all ranks, as `own_part` returns each: [parts, …], row-major.

    It copies x only if the parts do not follow each other in its memory, or if rows are padded.
    """
    if dim == 0 and x.shape[0] % parts == 0:
        return x.contiguous().view(parts, x.shape[0] // parts, *x.shape[1:])
    return torch.stack([own_part(x, place, parts, dim) for place in range(parts)])


def _reduce(xs: Sequence[torch.Tensor], **_: Any) -> Ranks:
    total = wide(xs[0])
    for x in xs[1:]:
        total = total + wide(x)
    return [total.to(xs[0].dtype, copy=True) for _ in xs]


def _gather(
    xs: Sequence[torch.Tensor], likes: Sequence[torch.Tensor | None] | None = None, *, dim: int, **_: Any
) -> Ranks:
    return [
        torch.cat(list(xs), dim) if like is None else torch.cat(list(xs), dim)[: like.shape[0]].clone()
        for like in likes or [None] * len(xs)
    ]


def _gather_fake(x: torch.Tensor, like: torch.Tensor | None = None, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    if like is None:
        return _resized(x, dim, x.shape[dim] * parts)
    if dim != 0 or x.shape[0] != part_of_symbol(like.shape[0], parts):
        raise ValueError(f"{parts} parts of {list(x.shape)} along dim {dim} are not the {like.shape[0]} rows of `like`")
    return _resized(x, 0, like.shape[0])


def _part(xs: Sequence[torch.Tensor], *, dim: int, **_: Any) -> Ranks:
    return [own_part(x, place, len(xs), dim) for place, x in enumerate(xs)]


def _reduce_part(xs: Sequence[torch.Tensor], *, dim: int, **_: Any) -> Ranks:
    return _part(_reduce(xs), dim=dim)


def _lookup(tokens: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], **_: Any) -> Ranks:
    results = []
    for place, (ids, weight) in enumerate(zip(tokens, weights, strict=True)):
        local = ids.long() - place * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        rows = weight.index_select(0, torch.where(mine, local, 0))
        results.append(torch.where(mine[:, None], rows, torch.zeros((), dtype=weight.dtype)))
    return results


def _move(xs: Sequence[torch.Tensor], *, src: str, dst: str, dim: int = 0, **_: Any) -> Ranks:
    """Move a value from the placement `src` to the placement `dst`, and return it for each rank.

    `xs` holds the value of each rank before. A placement is "replicated", "shard" (split along `dim`) or "partial" (a
    sum over ranks that is still to be added).
    """
    return _MOVES[src, dst][1](xs, dim=dim)


# The op that moves a value from one placement to another, and its meaning.
_MOVES: dict[tuple[str, str], tuple[str, Callable[..., Ranks]]] = {
    ("partial", "replicated"): ("all_reduce", _reduce),
    ("shard", "replicated"): ("all_gather", _gather),
    ("partial", "shard"): ("reduce_scatter", _reduce_part),
    ("replicated", "shard"): ("take_part", _part),
}


def collective_of(source: str, target: str) -> str | None:
    """Return the name of the collective that moves a value between two placements; None if there is none.

    The placements are "replicated", "shard" or "partial" (a sum over ranks that is still to be added).
    """
    move = _MOVES.get((source, target))
    return move[0] if move else None


def _move_fake(x: torch.Tensor, *, axis: str, src: str, dst: str, dim: int = 0, parts: int = 1) -> torch.Tensor:
    if (src, dst) not in _MOVES:
        raise ValueError(f"no collective moves a value from {src} to {dst}")
    if dst == "shard":
        return _resized(x, dim, _divided(x, dim, parts))
    return _resized(x, dim, x.shape[dim] * (parts if src == "shard" else 1))


def _collective(source: str = "", target: str = "") -> Rule:
    """Return the placement rule of a collective that moves x from one placement to another on its mesh axis.

    `source` and `target` are "replicated", "shard" or "partial". Without them, the arguments `src` and `dst` of the
    call are used. On other axes of the mesh, the placement of x does not change.
    """

    def rule(call: Call) -> Fit:
        if call.values["axis"] != call.axis:
            return Fit({"x": call.at["x"]}, call.at["x"])
        _check_parts(call)
        spots = {
            "replicated": None,
            "partial": call.partial,
            "shard": call.shard(call.values.get("dim", 0)),
        }
        return Fit({"x": spots[call.values.get("src", source)]}, spots[call.values.get("dst", target)])

    return rule


def _check_parts(call: Call) -> None:
    if call.values.get("parts", call.parts) != call.parts:
        raise VerifyError(f"{call.values['parts']} parts on axis {call.axis}", expected=f"{call.parts}, its size")


def _vocab_placement(call: Call) -> Fit:
    if call.values["axis"] != call.axis:
        return whole(call)
    _check_parts(call)
    return Fit({"weight": call.shard(0)}, call.partial)


@define(
    samples=_samples(),
    fake=lambda x, *, axis: torch.empty_like(x, memory_format=torch.contiguous_format),
    across=_reduce,
    fusible=False,
    flops=1,
    placement=_collective("partial", "replicated"),
)
def all_reduce(x: torch.Tensor, *, axis: str) -> torch.Tensor:
    """Return the sum of x over the ranks of the mesh axis `axis`, in x's dtype.

    The ranks' values are added in rank order, in float32 or wider. Only the sum is rounded.
    """
    raise _alone("all_reduce", axis)


@define(
    samples=_samples(dim=1, parts=2),
    fake=_gather_fake,
    across=_gather,
    fusible=False,
    flops=0,
    placement=_collective("shard", "replicated"),
)
def all_gather(x: torch.Tensor, like: torch.Tensor | None = None, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    """Concatenate x of all ranks of the mesh axis `axis` along `dim`. `parts` is the number of ranks.

    If x is a part of rows that may not divide, `like` is a value with as many rows as the result: padding is cut off.
    """
    raise _alone("all_gather", axis)


@define(
    samples=_samples(dim=1, parts=2),
    fake=_part_fake,
    across=_reduce_part,
    fusible=False,
    flops=1,
    placement=_collective("partial", "shard"),
)
def reduce_scatter(x: torch.Tensor, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    """Add up x over the ranks of the mesh axis `axis`, and return this rank's part of the sum along `dim`.

    It adds as `all_reduce` does. `parts` is the number of ranks. If the rows (dim 0) do not divide, the last parts end
    with rows of zeros.
    """
    raise _alone("reduce_scatter", axis)


@define(
    samples=_samples(dim=1, parts=2),
    fake=_part_fake,
    across=_part,
    fusible=False,
    flops=0,
    placement=_collective("replicated", "shard"),
)
def take_part(x: torch.Tensor, *, axis: str, dim: int, parts: int) -> torch.Tensor:
    """Return this rank's part of x along `dim`, without communication.

    All ranks of the mesh axis `axis` hold equal x. `parts` is the number of ranks. If the rows (dim 0) do not divide,
    the last parts end with rows of zeros.
    """
    raise _alone("take_part", axis)


def _lookup_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    ids = torch.randint(0, 50, (7,), generator=g, dtype=torch.int32)
    return [Sample((ids, torch.randn(25, 24, generator=g).to(dtype)), {"axis": "tp", "parts": 2})]


@define(
    samples=_lookup_samples,
    fake=lambda tokens, weight, *, axis, parts: weight.index_select(0, tokens),
    across=_lookup,
    flops=0,
    traffic=lambda tokens, weight, **_: {"weight": rows_bytes(tokens, weight)},
    fusible=False,
    placement=_vocab_placement,
)
def vocab_embedding(tokens: torch.Tensor, weight: torch.Tensor, *, axis: str, parts: int) -> torch.Tensor:
    """Return the embeddings [T, D] of the token ids [T] in this rank's part of the vocabulary, and zeros for others.

    `weight` [V / parts, D] is that part of the table. The sum of the results over the ranks of `axis` is the embedding.
    """
    raise _alone("vocab_embedding", axis)


@define(
    samples=_samples(src="partial", dst="replicated", parts=2),
    fake=_move_fake,
    across=_move,
    fusible=False,
    legal="open",
    flops=1,
    placement=_collective(),
)
def redistribute(x: torch.Tensor, *, axis: str, src: str, dst: str, dim: int = 0, parts: int = 1) -> torch.Tensor:
    """Move x from the placement `src` to the placement `dst` on the mesh axis `axis`.

    A placement is "replicated", "shard" (split along `dim`) or "partial" (a sum over ranks that is still to be added).
    `parts` is the number of ranks. The pass insert-collectives replaces this op by a collective.
    """
    raise _alone("redistribute", axis)
