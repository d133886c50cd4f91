"""Each op's placement rule against the op itself, computed in parts."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from mesh_program import PARTIAL, shard
from torch import fx

from ingot.ir.errors import VerifyError
from ingot.ir.formats import FORMATS, quantize
from ingot.ir.infer_placement import fit
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS, Op, Sample
from ingot.ir.ops.aten import ATEN
from ingot.ir.placements import Fit, viewed_dim
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import Placement, TensorType

RANKS = 2
Spot = Placement | None


def parts_of(value: torch.Tensor, spot: Spot) -> list[torch.Tensor]:
    """The value as each rank has it."""
    if spot is None:
        return [value] * RANKS
    if spot.kind == "partial":
        share = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
        return [share, value - share]
    if spot.segments:
        pieces = [piece.chunk(RANKS, spot.dim) for piece in value.split(list(spot.segments), spot.dim)]
        return [torch.cat([piece[rank] for piece in pieces], spot.dim) for rank in range(RANKS)]
    return [part.contiguous() for part in value.chunk(RANKS, spot.dim)]


def whole_of(parts: Sequence[torch.Tensor], spot: Spot) -> torch.Tensor:
    """What the ranks have together."""
    if spot is None:
        comparable = [part.float() if part.dtype is torch.float8_e4m3fn else part for part in parts]
        assert all(torch.equal(part, comparable[0]) for part in comparable), "ranks differ in a value that all have"
        return parts[0]
    if spot.kind == "partial":
        return parts[0] + parts[1]
    if spot.segments:
        split = [part.split([size // RANKS for size in spot.segments], spot.dim) for part in parts]
        return torch.cat([torch.cat(pieces, spot.dim) for pieces in zip(*split, strict=True)], spot.dim)
    return torch.cat(list(parts), spot.dim)


def spots_for(value: torch.Tensor) -> list[Spot]:
    found: list[Spot] = [None, *(shard(dim) for dim, size in enumerate(value.shape) if size % RANKS == 0 and size)]
    halves = {dim: size // 2 for dim, size in enumerate(value.shape) if size % (2 * RANKS) == 0 and size}
    found += [shard(dim, size, size) for dim, size in halves.items()]
    # torch adds no floats of eight bits
    return [*found, PARTIAL] if value.is_floating_point() and value.dtype.itemsize > 1 else found


def ask(target: Any, states: Sequence[str], values: dict[str, Any], kwargs: dict[str, Any], at: dict[str, Spot]) -> Fit:
    """What the rule says to arguments that lie as given. Raises VerifyError."""
    program = Program("p", Stage.SHARDED, {}, mesh={"tp": RANKS})
    look: dict[fx.Node, tuple[Placement, ...]] = {}
    args = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            args.append(value)
            continue
        spot, own = at[key], parts_of(value, at[key])[0]
        value_type = TensorType(own.dtype, tuple(own.shape))
        if key in states:
            node = program.add_state(key, StateSpec("sample", "g", "token", value_type))
        else:
            node = program.add_input(key, value_type)
        look[node] = (spot,) if spot is not None else ()
        args.append(node)
    node = program.graph.create_node("call_function", target, tuple(args), kwargs)
    node.meta["type"] = TensorType(torch.float64, ())  # only the rule of a view reads it
    return fit(node, program, "tp", look.__getitem__)


def ways_of(tensors: dict[str, torch.Tensor], says: Callable[[dict[str, Spot]], Fit]) -> Iterator[dict[str, Spot]]:
    """Arrangements to try: all for up to three arguments; for more what the rule wants when one of them is split."""
    if len(tensors) <= 3:
        for choice in itertools.product(*(spots_for(value) for value in tensors.values())):
            yield dict(zip(tensors, choice, strict=True))
        return
    whole: dict[str, Spot] = dict.fromkeys(tensors)
    yield whole
    for key, value in tensors.items():
        for spot in spots_for(value):
            needs = says({**whole, key: spot}).needs
            at = {name: needs.get(name) for name in tensors}
            if all(place is None or place in spots_for(tensors[name]) for name, place in at.items()):
                yield at


def check_in_parts(name: str, op: Op | None, target: Any, sample: Sample) -> set[str]:
    """Compute the sample in parts for each way of splitting that the rule accepts; those ways, in words."""
    names = op.parameters.names if op is not None else ("x", "other", "start", "end")
    values = dict(zip(names, sample.args, strict=False))
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    function, states = (target, ()) if op is None else (op.reference, op.states)
    expected = function(*sample.args, **sample.kwargs)
    several = isinstance(expected, tuple)
    ways: dict[str, dict[str, Spot]] = {}

    def says(at: dict[str, Spot]) -> Fit:
        try:
            return ask(target, states, values, sample.kwargs, at)
        except VerifyError:
            return Fit({"": PARTIAL})  # which no argument is

    for at in ways_of(tensors, says):
        found = says(at)
        way = " ".join(f"{key}:{spot.kind}{spot.dim}" for key, spot in at.items() if spot is not None)
        if "" in found.needs or any(at[key] != found.needs.get(key) for key in at):
            continue
        ways[way] = at
        split = {key: parts_of(value, at[key]) for key, value in tensors.items()}
        results = [
            function(*(split[key][rank] if key in split else value for key, value in values.items()), **sample.kwargs)
            for rank in range(RANKS)
        ]
        for index, wanted in enumerate(expected if several else (expected,)):
            own = [result[index] if several else result for result in results]
            spot = found.result[index] if isinstance(found.result, tuple) else found.result
            problem = compare(whole_of(own, spot), wanted, wanted.dtype, factor=10)  # shares of a sum are larger
            assert problem is None, f"{name} of {at} as {found.result}: {problem}"
    return set(ways)


# Ways of splitting that the rules accept, beside nothing split at all.
WAYS: dict[str, set[str]] = {
    "activate": {"x:shard1"},
    "add_rms_norm": {"x:shard0 residual:shard0"},
    "append_attention": {
        "kv:shard3 q:shard1 k:shard1 v:shard1",
        "kv:shard3 q:shard1 k:shard1 v:shard1 sinks:shard0",
        "kv:shard3 q:shard1 k:shard1 v:shard1 slopes:shard0",
    },
    "attention": {
        "q:shard1 k:shard1",
        "q:shard1 k:shard1 v:shard1",
        "q:shard1 k:shard1 v:shard1 sinks:shard0",
        "q:shard1 k:shard1 v:shard1 slopes:shard0",
        "q:shard1 k:shard1 v:shard1 sinks:shard0 slopes:shard0",
    },
    "cast": {"x:shard1"},
    "clamp": {"x:shard0", "x:shard1"},
    "concat": {"x:shard1 y:shard1", "x:shard2 y:shard2"},
    "dequantize": {
        "weight:shard1",
        "weight:shard0 scales:shard0",
        "weight:shard1 scales:shard1",
        "weight:shard0 scales:shard0 zeros:shard0",
        "weight:shard1 scales:shard1 zeros:shard1",
        "weight:shard0 scales:shard0 offsets:shard0",
        "weight:shard1 scales:shard1 offsets:shard1",
        "weight:shard0 scales:shard0 outer:shard0",
    },
    "experts": {
        "gate_up:shard1 down:shard2",
        "gate_up:shard1 down:shard2 gate_up_scales:shard1 gate_up_zeros:shard1",
        "gate_up:shard1 down:shard2 down_scales:shard2 down_zeros:shard2",
    },
    "gelu_mul": {"gate:shard1 up:shard1"},
    "head_linear": {"x:shard1 weight:shard0"},
    "kv_append": {"kv:shard3 k:shard1", "kv:shard3 k:shard1 v:shard1"},
    "latent_attention": {"q:shard1 q_rotated:shard1 k_up:shard0 v_up:shard0"},
    "layer_norm": {"x:shard0", "x:shard1", "x:shard1 weight:shard0", "x:shard1 weight:shard0 bias:shard0"},
    "linear": {
        "weight:shard0",
        "weight:shard0 bias:shard0",
        "x:shard1 weight:shard1",
    },
    "merge_attention": {"one:shard1 one_lse:shard1 other:shard1 other_lse:shard1"},
    "move_slots": {"kv:shard3"},
    "paged_attention": {
        "q:shard1 kv:shard3",
        "q:shard1 kv:shard3 sinks:shard0",
        "q:shard1 kv:shard3 slopes:shard0",
        "q:shard1 kv:shard3 sinks:shard0 slopes:shard0",
    },
    "partial_attention": {"q:shard1 kv:shard3", "q:shard1 kv:shard3 sinks:shard0"},
    "quant_linear": {
        "weight:shard0",
        "weight:shard0 bias:shard0",
        "weight:shard0 scales:shard0",
        "weight:shard0 scales:shard0 bias:shard0",
        "weight:shard0 scales:shard0 zeros:shard0",
        "weight:shard0 scales:shard0 zeros:shard0 bias:shard0",
        "x:shard1 weight:shard1",
        "weight:shard0 scales:shard0 bias:shard0 offsets:shard0",
        "weight:shard0 scales:shard0 bias:shard0 outer:shard0",
        "x:shard1 weight:shard1 scales:shard1",
        "x:shard1 weight:shard1 scales:shard1 zeros:shard1",
    },
    "qk_norm_rope_append": {"kv:shard3 q:shard1 k:shard1 v:shard1"},
    "rms_norm": {"x:shard0", "x:shard1"},
    "rope": {"x:shard1"},
    "scale_by_position": {"x:shard1", "x:shard2", "x:partial0"},
    "select_rows": {"x:shard1", "x:partial0"},
    "silu_mul": {"gate:shard1 up:shard1"},
    "sparse_attention": {"q:shard1", "q:shard1 kv:shard3"},
    **{name: {"state:shard1"} for name in ("state_copy", "state_move", "state_zero")},
    "step_attention": {
        "q:shard1 k:shard1 v:shard1",
        "q:shard1 k:shard1 v:shard1 sinks:shard0",
        "q:shard1 k:shard1 v:shard1 slopes:shard0",
        "q:shard1 k:shard1 v:shard1 sinks:shard0 slopes:shard0",
    },
    "step_latent_attention": {"q:shard1 q_rotated:shard1 k:shard1 v:shard1 before:shard1 before_lse:shard1"},
    "soft_cap": {"x:shard0", "x:shard1"},
}
EXTRA: dict[str, list[Sample]] = {
    "rope": [Sample((torch.randn(4, 2, 6).double(), torch.tensor([0, 3, 1, 2], dtype=torch.int32), torch.randn(5, 4)))],
    "layer_norm": [
        Sample((torch.randn(3, 4, 6).double(), torch.randn(6).double()), {"eps": 0.1}),
        Sample((torch.randn(3, 4, 6).double(), *torch.randn(2, 4, 6).double()), {"eps": 0.1}),
    ],
    "clamp": [Sample((torch.randn(3, 6).double(),), {"limit": 0.5})],
    "soft_cap": [Sample((torch.randn(3, 6).double(),), {"cap": 2.0})],
    "attention": [],
    "quant_linear": [
        Sample(
            (torch.randn(3, 64).double(), *quantize(torch.randn(4, 64), FORMATS["int4_g32_asym"]).values()),
            {"format": "int4_g32_asym"},
        )
    ],
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.across is None))
def test_what_a_rule_accepts_computes_the_same_in_parts(name: str) -> None:
    op = OPS[name]
    samples = [*op.samples(torch.Generator().manual_seed(0), torch.float64), *EXTRA.get(name, [])]
    ways = set().union(*(check_in_parts(name, op, op.overload, sample) for sample in samples))
    assert "" in ways, "what is whole stays whole"
    assert ways - {""} == WAYS.get(name, set()), "WAYS lists the ways in which the op's rule splits it"


def test_arithmetic_in_parts() -> None:
    x, other, row = torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.randn(4).double()
    add, mul = ATEN["aten.add.Tensor"].overload, ATEN["aten.mul.Tensor"].overload
    ways = {
        (name, index): check_in_parts(name, None, target, Sample(args))
        for name, target in (("add", add), ("mul", mul))
        for index, args in enumerate([(x, other), (x, row), (x, 3.0), (x[:, None], other[:, None])])
    }
    split = {"", "x:shard1 other:shard1"}
    assert ways["add", 0] == split | {"x:partial0 other:partial0"} and ways["mul", 0] == split
    assert ways["mul", 1] == {"", "x:shard1 other:shard0"}
    assert ways["add", 1] == ways["mul", 1] | {"x:partial0 other:partial0"}
    assert ways["add", 2] == {"", "x:shard1"} and ways["mul", 2] == {"", "x:shard1", "x:partial0"}
    assert ways["mul", 3] == {"", "x:shard2 other:shard2"}
    turned = check_in_parts("permute", None, ATEN["aten.permute.default"].overload, Sample((x[:, None], [2, 0, -2])))
    assert turned == {"", "x:shard2", "x:partial0"}


@pytest.mark.parametrize(
    ("shape", "viewed", "dim", "expected"),
    [
        (("T", 12), ("T", 3, 4), 1, 1),
        (("T", 3, 4), ("T", 12), 1, 1),
        (("T", 3, 4), ("T", 12), 2, None),
        ((6, 4), (2, 3, 4), 0, 0),
        ((6, 4), (2, 3, 4), 1, 2),
        ((2, 3, 4), (6, 4), 1, None),
        ((6, 4), (4, 6), 0, 0),
        ((6, 4), (4, 6), 1, None),
        (("T", 12), ("B", 12), 1, None),
        ((2, "T", 12), (2, "T", 4, 3), 2, 2),
    ],
)
def test_where_a_part_lies_in_a_view(shape: Any, viewed: Any, dim: int, expected: int | None) -> None:
    assert viewed_dim(shape, viewed, dim) == expected
    if expected is None or "B" in viewed:
        return
    sizes = {"T": 6}
    whole = torch.randn([sizes.get(size, size) for size in shape])
    parts = whole.chunk(math.gcd(shape[dim], viewed[expected]), dim)
    local = [sizes.get(size, size) for size in viewed]
    local[expected] //= len(parts)
    again = torch.cat([part.reshape(local) for part in parts], expected)
    assert torch.equal(again, whole.view([sizes.get(size, size) for size in viewed]))
