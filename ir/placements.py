"""Placement rules: for each op, how its arguments must lie on an axis of the mesh, and how its result then does.

A rule looks at one axis at a time. On an axis a value is split (`Placement` of kind shard), a sum that is still due
(partial), or the same on every rank, for which the rules write None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.ir.errors import VerifyError
from ingot.ir.formats import find_format
from ingot.ir.types import Placement, Size, Split, TensorType, ValueType

Spot = Placement | None


@dataclass(frozen=True)
class Call:
    """A call as one axis sees it: its arguments by parameter name; spots and types of those that are values.

    Types are those of a rank; a state's is that of its spec.
    """

    values: Mapping[str, Any]
    at: Mapping[str, Spot]
    types: Mapping[str, TensorType]
    result: ValueType
    axis: str
    parts: int

    def shard(self, dim: int, segments: tuple[int, ...] = ()) -> Placement:
        return Placement(self.axis, "shard", dim, segments)

    @property
    def partial(self) -> Placement:
        return Placement(self.axis, "partial")

    def kind(self, name: str) -> str:
        spot = self.at.get(name)
        return spot.kind if spot is not None else "replicated"

    def is_shard(self, name: str, dim: int) -> bool:
        return self.at.get(name) == self.shard(dim)

    def size(self, name: str, dim: int) -> Size:
        return self.types[name].shape[dim]


@dataclass(frozen=True)
class Fit:
    """What a rule says: the spot that each argument must have (replicated where none is named), and the results'."""

    needs: Mapping[str, Spot] = field(default_factory=dict)
    result: Spot | tuple[Spot, ...] = None


Rule = Callable[[Call], Fit]


def whole(call: Call) -> Fit:
    """Every rank has all of everything."""
    return Fit()


def _elementwise(call: Call) -> Fit:
    """All arguments split alike, counted from the last axis, as broadcasting does."""
    ranks = {name: len(value_type.shape) for name, value_type in call.types.items()}
    split = {name: spot for name, spot in call.at.items() if spot is not None and spot.kind == "shard"}
    places = {(spot.dim - ranks[name], spot.segments) for name, spot in split.items()}
    if len(places) != 1:
        return whole(call)
    dim, segments = places.pop()
    for name in call.types.keys() - split.keys():
        if ranks[name] >= -dim and call.size(name, dim) != 1:
            return whole(call)  # one that is whole along the split axis
    return Fit(split, call.shard(max(ranks.values()) + dim, segments))


def _sum(call: Call) -> Fit:
    """A sum of partial sums is a partial sum."""
    if len(call.types) == 2 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return _elementwise(call)


def _product(call: Call) -> Fit:
    """A multiple of a partial sum by a constant is one too."""
    if len(call.types) == 1 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return _elementwise(call)


def _linear(call: Call) -> Fit:
    """A weight split by rows gives a split result; one split by columns takes a split x and gives partial sums."""
    weight = call.at["weight"]
    last = len(call.types["x"].shape) - 1
    if weight is not None and weight.kind == "shard" and weight.dim == 0:
        bias = {"bias": weight} if "bias" in call.types else {}
        return Fit({"weight": weight, **bias}, call.shard(last, weight.segments))
    if weight == call.shard(1):
        _check_bias(call)
        return Fit({"weight": weight, "x": call.shard(last)}, call.partial)
    return whole(call)


def _check_bias(call: Call) -> None:
    if "bias" in call.types:
        raise VerifyError("a bias on partial sums is added once by each rank", expected="an add behind the sum")


def _quant_linear(call: Call) -> Fit:
    """As a linear. Where the packed elements are split, what scales them is too; all in sizes of their own."""
    weight, format = call.at["weight"], find_format(call.values["format"])
    if weight is None or weight.kind != "shard" or weight.dim > 1 or (weight.dim and weight.segments):
        return whole(call)
    tile, last = format.layout.tile[weight.dim], len(call.types["x"].shape) - 1
    split = Split(call.axis, weight.dim, tuple(size * tile for size in weight.segments))
    needs: dict[str, Spot] = {"weight": weight}
    for part in format.parts[1:]:
        if part in call.types and (own := format.split(split, part)) is not None:
            needs[part] = call.shard(own.dim, own.segments)
    if weight.dim == 0:
        bias = {"bias": call.shard(0, split.segments)} if "bias" in call.types else {}
        return Fit({**needs, **bias}, call.shard(last, split.segments))
    _check_bias(call)
    return Fit({**needs, "x": call.shard(last)}, call.partial)


def _norm(call: Call) -> Fit:
    """Over the last axis, so any other may be split; gains of one row for each head are split with the heads."""
    x = call.at["x"]
    if len(call.types["weight"].shape) == 2:
        if call.is_shard("x", 1) or call.is_shard("weight", 0):
            bias = {"bias": call.shard(0)} if "bias" in call.types else {}
            return Fit({"x": call.shard(1), "weight": call.shard(0), **bias}, call.shard(1))
        return whole(call)
    if x is not None and x.kind == "shard" and x.dim < len(call.types["x"].shape) - 1:
        return Fit({"x": x}, x)
    return whole(call)


def _moe(call: Call) -> Fit:
    """Every rank has a part of each expert, of gate and up alike, and gives partial sums."""
    if call.kind("gate_up") != "shard" and not call.is_shard("down", 2):
        return whole(call)
    size = call.size("down", 2)
    assert isinstance(size, int)
    halves = (size * call.parts,) * 2
    return Fit({"gate_up": call.shard(1, halves), "down": call.shard(2)}, call.partial)


def _rope(call: Call) -> Fit:
    return Fit({"x": call.shard(1)}, call.shard(1)) if call.is_shard("x", 1) else whole(call)


def _select_rows(call: Call) -> Fit:
    x = call.at["x"]
    return Fit({"x": x}, x) if x is not None and (x.kind == "partial" or x.dim > 0) else whole(call)


def _by_heads(call: Call, dims: Mapping[str, int], result: Spot | tuple[Spot, ...]) -> Fit:
    """Attention and what leads to it: all arguments in `dims` split by heads, or none."""
    given = {name: dim for name, dim in dims.items() if name in call.types}
    if not any(call.is_shard(name, dim) for name, dim in given.items()):
        return whole(call)
    return Fit({name: call.shard(dim) for name, dim in given.items()}, result)


def _attention(call: Call) -> Fit:
    fit = _by_heads(call, {"q": 1, "k": 1, "v": 1, "sinks": 0, "slopes": 0}, call.shard(1))
    if fit.needs and call.at["k"] is None and call.values.get("v") is None and int(call.size("k", 1)) % call.parts:
        raise VerifyError(
            f"a cache whose rows are keys and values has {call.size('k', 1)} heads: no split among {call.parts} ranks",
            expected="all heads of q on every rank, or heads of the cache that divide",
        )
    if fit.needs and all(call.at[name] == fit.needs[name] for name in ("q", "k")):
        heads, kv_heads = call.size("q", 1), call.size("k", 1)
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        if heads % kv_heads:
            raise VerifyError(f"a rank has {heads} heads of q for {kv_heads} of k and v", expected="a multiple")
    return fit


def _step_attention(call: Call) -> Fit:
    return _by_heads(call, {"q": 1, "k": 1, "v": 1, "sinks": 0, "slopes": 0}, call.shard(1))


def _kv_append(call: Call) -> Fit:
    return _by_heads(call, {"kv": 3, "k": 1, "v": 1}, call.shard(3))


def _move_slots(call: Call) -> Fit:
    return _by_heads(call, {"kv": 3}, call.shard(3))


def _paged_attention(call: Call) -> Fit:
    return _by_heads(call, {"q": 1, "kv": 3, "sinks": 0, "slopes": 0}, call.shard(1))


def _partial_attention(call: Call) -> Fit:
    return _by_heads(call, {"q": 1, "kv": 3, "sinks": 0}, (call.shard(1), call.shard(1)))


def _merge_attention(call: Call) -> Fit:
    names = ("one", "one_lse", "other", "other_lse")
    return _by_heads(call, dict.fromkeys(names, 1), (call.shard(1), call.shard(1)))


def _qk_norm_rope_append(call: Call) -> Fit:
    return _by_heads(call, {"kv": 3, "q": 1, "k": 1, "v": 1}, (call.shard(1), call.shard(3)))


def _append_attention(call: Call) -> Fit:
    dims = {"kv": 3, "q": 1, "k": 1, "v": 1, "sinks": 0, "slopes": 0}
    return _by_heads(call, dims, (call.shard(1), call.shard(3)))


def _between_steps(call: Call) -> Fit:
    """A rank copies, moves and clears its part of a state, split along any axis but the one of pages or slots."""
    state = call.at["state"]
    kept = state is None or (state.kind == "shard" and state.dim != call.values["axis"])
    return Fit({"state": state}, state) if kept else whole(call)


def _view(call: Call) -> Fit:
    x = call.at["x"]
    if x is None or x.kind == "partial":
        return Fit({"x": x}, x)
    assert isinstance(call.result, TensorType)
    found = viewed_dim(call.types["x"].shape, call.result.shape, x.dim)
    if found is None or (x.segments and call.size("x", x.dim) != call.result.shape[found]):
        return whole(call)
    return Fit({"x": x}, call.shard(found, x.segments))


def viewed_dim(shape: tuple[Size, ...], viewed: tuple[Size, ...], dim: int) -> int | None:
    """Where a part along `dim` of `shape` lies in a view of it: the axis of `viewed`; None where it is torn apart.

    Axes that a view splits or joins form a group of equal size on both sides; a part stays one where the split axis is
    the outermost of its group.
    """
    i = j = 0
    while i < len(shape) and j < len(viewed):
        first, left, right = (i, j), shape[i], viewed[j]
        i, j = i + 1, j + 1
        while left != right:
            if isinstance(left, str) or isinstance(right, str):
                return None
            if left < right:
                if i == len(shape) or isinstance(size := shape[i], str):
                    return None
                left, i = left * size, i + 1
            else:
                if j == len(viewed) or isinstance(size := viewed[j], str):
                    return None
                right, j = right * size, j + 1
        if dim < i:
            return first[1] if dim == first[0] else None
    return None


def _slice(call: Call) -> Fit:
    """Along a split axis only whole segments can be taken."""
    x, values = call.at["x"], call.values
    if x is None or x.kind == "partial" or x.dim != values["dim"]:
        return Fit({"x": x}, x)
    bounds = [0]
    for segment in x.segments:
        bounds.append(bounds[-1] + segment // call.parts)
    if values["step"] != 1 or values["start"] not in bounds or values["end"] not in bounds:
        return whole(call)
    kept = x.segments[bounds.index(values["start"]) : bounds.index(values["end"])]
    return Fit({"x": x}, call.shard(x.dim, kept if len(kept) > 1 else ()))


def _permute(call: Call) -> Fit:
    x = call.at["x"]
    if x is None or x.kind == "partial":
        return Fit({"x": x}, x)
    axes = len(call.types["x"].shape)
    return Fit({"x": x}, call.shard([dim % axes for dim in call.values["dims"]].index(x.dim), x.segments))


def _collective(source: str = "", target: str = "") -> Rule:
    """From one kind of placement to another along the op's own axis, by its `src` and `dst` where it has them; along
    others it changes nothing."""

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


def _vocab_embedding(call: Call) -> Fit:
    if call.values["axis"] != call.axis:
        return whole(call)
    _check_parts(call)
    return Fit({"weight": call.shard(0)}, call.partial)


# By printed name. An op of another package takes and gives whole values.
RULES: Mapping[str, Rule] = {
    "aten.add.Tensor": _sum,
    "aten.mul.Tensor": _product,
    "aten.permute.default": _permute,
    "aten.slice.Tensor": _slice,
    "aten.view.default": _view,
    "ingot.accept_drafts": whole,
    "ingot.accept_tree": whole,
    "ingot.add_rms_norm": whole,
    "ingot.advance": whole,
    "ingot.all_gather": _collective("shard", "replicated"),
    "ingot.all_reduce": _collective("partial", "replicated"),
    "ingot.append_attention": _append_attention,
    "ingot.attention": _attention,
    "ingot.activate": _elementwise,
    "ingot.cast": _elementwise,
    "ingot.clamp": _elementwise,
    "ingot.concat": whole,
    "ingot.count_tokens": whole,
    "ingot.embedding": whole,
    "ingot.feed": whole,
    "ingot.fill_block": whole,
    "ingot.move_slots": _move_slots,
    "ingot.page_slots": whole,
    "ingot.gaussian_top_k": whole,  # its cutoff is that of a whole row
    "ingot.gelu_mul": _elementwise,
    "ingot.kv_append": _kv_append,
    "ingot.layer_norm": _norm,
    "ingot.linear": _linear,
    "ingot.match_rms": whole,
    "ingot.merge_attention": _merge_attention,
    "ingot.mix": whole,
    "ingot.moe": _moe,
    "ingot.paged_attention": _paged_attention,
    "ingot.partial_attention": _partial_attention,
    "ingot.pool": whole,
    "ingot.qk_norm_rope_append": _qk_norm_rope_append,
    "ingot.quant_linear": _quant_linear,
    "ingot.read_rows": whole,
    "ingot.redistribute": _collective(),
    "ingot.reduce_scatter": _collective("partial", "shard"),
    "ingot.rms_norm": _norm,
    "ingot.rope": _rope,
    "ingot.sample": whole,
    "ingot.select_rows": _select_rows,
    "ingot.silu_mul": _elementwise,
    "ingot.soft_cap": _elementwise,
    "ingot.state_copy": _between_steps,
    "ingot.state_move": _between_steps,
    "ingot.state_zero": _between_steps,
    "ingot.step_attention": _step_attention,
    "ingot.take_block": whole,
    "ingot.take_drafts": whole,
    "ingot.take_part": _collective("replicated", "shard"),
    "ingot.top_logprobs": whole,
    "ingot.tree_ancestors": whole,
    "ingot.tree_positions": whole,
    "ingot.vocab_embedding": _vocab_embedding,
    "ingot.write_rows": whole,
}
