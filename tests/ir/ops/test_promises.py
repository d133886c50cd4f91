"""What is promised of all ops alike: names, shapes, purity, rows, in-place and decomposed forms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from eight_bit_samples import eight_bit_samples
from odd_samples import MOVERS, odd_samples
from op_values import BF16, F32, check, every_dtype, generator, ints, randn, random_step, two_dtypes
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot.ir.errors import InternalError
from ingot.ir.masks import Mask
from ingot.ir.ops import OPS, Op, Sample, define, op_of
from ingot.ir.placements import whole

pytestmark = pytest.mark.one_in_file(3)

ROWS: dict[str, tuple[str, ...]] = {
    "embedding": ("tokens",),
    "linear": ("x",),
    "head_linear": ("x",),
    "quant_linear": ("x",),
    "round_rows": ("x",),
    "rounded_linear": ("x", "x_scales"),
    "rms_norm": ("x",),
    "add_rms_norm": ("x", "residual"),
    "rope": ("x", "positions"),
    "scale_by_position": ("x", "positions"),
    "silu_mul": ("gate", "up"),
    "gelu_mul": ("gate", "up"),
    "activate": ("x",),
    "layer_norm": ("x",),
    "soft_cap": ("x",),
    "clamp": ("x",),
    "select_rows": ("rows",),
    "cast": ("x",),
    "concat": ("x", "y"),
    "gaussian_top_k": ("x",),
    "match_rms": ("x", "like"),
    "mix": ("x", "weights"),
    "experts": ("x", "weights", "chosen"),
    "route": ("router_logits",),
    "sparse_mixer": ("router_logits",),
    "lora_shrink": ("x", "slots"),
    "lora_expand": ("y", "shrunk", "slots"),
    "merge_attention": ("one", "one_lse", "other", "other_lse"),
    "sample": (
        "logits",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "seeds",
        "positions",
        "count_rows",
        "repetition",
        "frequency",
        "presence",
        "banned",
        "edit_rows",
    ),
    "top_logprobs": ("logits", "sampled", "targets", "num_logprobs"),
}


# Ops whose rows belong to sequences or to a state.
WHOLE = (
    "append_attention",
    "attention",
    "choose_positions",
    "latent_attention",
    "paged_attention",
    "paged_choose_positions",
    "partial_attention",
    "sparse_attention",
    "step_attention",
    "step_latent_attention",
    "pool",
    "dequantize",
    "kv_append",
    "qk_norm_rope_append",
    "feed",
    "page_slots",
    "advance",
    "count_tokens",
    "take_drafts",
    "accept_drafts",
    "take_block",
    "fill_block",
    "tree_ancestors",
    "tree_positions",
    "accept_tree",
    "move_slots",
    "read_rows",
    "write_rows",
    *MOVERS,
)

# Ops of several ranks, which have no reference for one: `test_collectives.py` has their tests.
COLLECTIVES = frozenset(name for name, op in OPS.items() if op.across is not None)


def cases(name: str, dtype: torch.dtype) -> list[Sample]:
    return OPS[name].samples(generator(), dtype) + odd_samples(name, dtype) + eight_bit_samples(name, dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same numbers; of caches in f8e4m3 the same bits, because those of scales in their rows may be NaN there."""
    if one.dtype is torch.float8_e4m3fn and other.dtype is one.dtype:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def over_tensors(sample: Sample, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    return replace(sample, args=tuple(change(arg) if isinstance(arg, torch.Tensor) else arg for arg in sample.args))


def named_rows(op: Op, sample: Sample) -> tuple[dict[str, Any], int]:
    named = op.bind(sample.args, sample.kwargs)
    return named, named[ROWS[op.name][0]].shape[0]


def test_every_op_is_tested_here() -> None:
    assert set(OPS) == {*ROWS, *WHOLE, *COLLECTIVES}, "list an op in ROWS, or in WHOLE if its rows are not its own"


every_op = pytest.mark.parametrize("name", sorted(OPS.keys() - COLLECTIVES))


@every_op
@every_dtype
def test_samples_are_reproducible(name: str, dtype: torch.dtype) -> None:
    first, second = OPS[name].samples(generator(3), dtype), OPS[name].samples(generator(3), dtype)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.kwargs == other.kwargs
        for left, right in zip(one.args, other.args, strict=True):
            assert (left is None and right is None) or equal(left, right)


@every_op
@two_dtypes
def test_op_through_torch_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    packet = getattr(torch.ops.ingot, name)
    assert op.overload is packet.default and op_of(op.overload) is op
    for sample in cases(name, dtype):
        expected = results(op.reference(*sample.args, **sample.kwargs))
        for call in (packet, op.overload, op):
            for found, wanted in zip(results(call(*sample.args, **sample.kwargs)), expected, strict=True):
                assert equal(found, wanted)


@every_op
@two_dtypes
def test_fake_has_the_shape_dtype_and_strides_of_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    mode = FakeTensorMode()
    for sample in cases(name, dtype):
        expected = results(op.reference(*sample.args, **sample.kwargs))
        metas = over_tensors(sample, to_meta)
        with mode:
            fakes = over_tensors(sample, mode.from_tensor)
            fake = results(op.overload(*fakes.args, **fakes.kwargs))
        for found in (
            results(op.fake(*metas.args, **metas.kwargs)),
            results(op.overload(*metas.args, **metas.kwargs)),
            fake,
        ):
            described = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in found]
            assert described == [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in expected]


@every_op
@two_dtypes
def test_op_is_pure(name: str, dtype: torch.dtype) -> None:
    """No argument changes, and no result shares memory with an argument."""
    op = OPS[name]
    for sample in cases(name, dtype):
        before = over_tensors(sample, torch.clone)
        for function in (op.reference, op.rowwise):
            given = [*sample.args, *sample.kwargs.values()]
            memory = {arg.untyped_storage().data_ptr() for arg in given if isinstance(arg, torch.Tensor)}
            for result in results(function(*sample.args, **sample.kwargs)):
                assert result.untyped_storage().data_ptr() not in memory
            for left, right in zip(sample.args, before.args, strict=True):
                assert left is right or equal(left, right)


@every_op
@two_dtypes
def test_rowwise_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in cases(name, dtype):
        pairs = zip(
            results(op.rowwise(*sample.args, **sample.kwargs)),
            results(op.reference(*sample.args, **sample.kwargs)),
            strict=True,
        )
        for found, expected in pairs:
            assert found.stride() == expected.stride()
            if expected.dtype is torch.float8_e4m3fn:
                assert equal(found, expected)
            else:
                check(found, expected, expected.dtype)


@pytest.mark.parametrize("name", sorted(ROWS))
@two_dtypes
def test_rowwise_gives_a_row_the_same_bits_alone(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in cases(name, dtype):
        named, count = named_rows(op, sample)
        whole = results(op.rowwise(**named))
        order = torch.randperm(count, generator=generator(12))
        shuffled = {key: value[order] if key in ROWS[name] else value for key, value in named.items()}
        for found, expected in zip(results(op.rowwise(**shuffled)), whole, strict=True):
            assert equal(found, expected[order])
        for row in range(count):
            alone = {key: value[row : row + 1].clone() if key in ROWS[name] else value for key, value in named.items()}
            for found, expected in zip(results(op.rowwise(**alone)), whole, strict=True):
                assert equal(found, expected[row : row + 1])


def test_rowwise_does_not_see_where_a_row_lies() -> None:
    """Sizes at which a math library takes other kernels for rows at odd addresses."""
    g = generator(4)
    for inputs, outputs in ((75, 210), (141, 93)):
        x, weight = randn(g, F32, 8, inputs), randn(g, F32, outputs, inputs)
        alone = [OPS["linear"].rowwise(x[row : row + 1].clone(), weight) for row in range(8)]
        assert equal(OPS["linear"].rowwise(x, weight), torch.cat(alone))
    q, kv = randn(g, F32, 9, 3, 5), randn(g, F32, 4, 2, 8, 3, 5)
    places = (ints(0, 1, 2, 3).view(1, 4), ints(0), ints(9), ints(30))
    whole = OPS["paged_attention"].rowwise(q, kv, *places, scale=0.3)
    for row in range(9):
        seen = ints(22 + row)
        one = OPS["paged_attention"].rowwise(q[row : row + 1].clone(), kv, places[0], ints(0), ints(1), seen, scale=0.3)
        assert equal(one, whole[row : row + 1])


@every_dtype
def test_rowwise_attention_does_not_see_the_rest_of_the_step(dtype: torch.dtype) -> None:
    op = OPS["attention"]
    for sample in cases("attention", dtype):
        q, k, v, positions, seqs, *sinks = sample.args
        chosen = sinks[2:]
        whole = op.rowwise(*sample.args, **sample.kwargs)
        for row in range(q.shape[0]):
            mask = Mask.named(sample.kwargs.get("mask", "causal"))
            seen = ((seqs == seqs[row]) & (positions < mask.end(positions[row]))).nonzero().flatten()
            own = (None if x is None else x[seen] for x in (q, k, v, positions, seqs))
            alone = op.rowwise(*own, *sinks[:2], *(one[seen] for one in chosen), **sample.kwargs)
            assert equal(alone[seen == row], whole[row : row + 1])


@every_dtype
def test_rowwise_paged_attention_does_not_see_the_rest_of_the_step(dtype: torch.dtype) -> None:
    op = OPS["paged_attention"]
    for sample in cases("paged_attention", dtype):
        q, kv, table, starts, lens, kv_lens, *sinks = sample.args
        mask = Mask.named(sample.kwargs.get("mask", "causal"))
        if mask.looks_ahead or mask.kind == "tree":
            continue  # such a row sees what its sequence feeds after it, or not all that is fed before it
        whole = op.rowwise(*sample.args, **sample.kwargs)
        for b in range(table.shape[0]):
            for i in range(int(lens[b])):
                row = slice(int(starts[b]) + i, int(starts[b]) + i + 1)
                seen = kv_lens[b : b + 1] - lens[b] + i + 1
                alone = op.rowwise(q[row], kv, table[b : b + 1], ints(0), ints(1), seen, *sinks, **sample.kwargs)
                assert equal(alone, whole[row])


@pytest.mark.parametrize("seed", range(10))
def test_feed_gives_a_sequence_the_same_alone(seed: int) -> None:
    args, page_size = random_step(seed)
    tokens, seqs, _, lens, rows, begins, table, last, position = args
    whole = OPS["feed"].rowwise(*args, page_size=page_size)
    for b in range(len(lens)):
        mine, one = seqs == b, slice(b, b + 1)
        if not bool(mine.any()):
            continue
        found = OPS["feed"].rowwise(
            tokens[mine], seqs[mine] * 0, ints(0), lens[one], rows[one], begins[one], table[one], last, position,
            page_size=page_size,
        )  # fmt: skip
        expected = (*(tensor[mine] for tensor in whole[:3]), whole[3][one])
        assert all(equal(left, right) for left, right in zip(found, expected, strict=True))


@every_dtype
def test_state_writes_do_not_depend_on_their_order(dtype: torch.dtype) -> None:
    for sample in cases("kv_append", dtype):
        kv, k, v, slots = sample.args
        one_by_one = kv
        for row in reversed(range(slots.shape[0])):
            one = slice(row, row + 1)
            values = None if v is None else v[one]
            one_by_one = OPS["kv_append"].rowwise(one_by_one, k[one], values, slots[one], **sample.kwargs)
        assert equal(one_by_one, OPS["kv_append"].rowwise(*sample.args, **sample.kwargs))
    for sample in cases("advance", dtype):
        states, (rows, kv_lens, sampled, index, *taken) = sample.args[:2], sample.args[2:]
        for b in reversed(range(rows.shape[0])):
            one = slice(b, b + 1)
            back = [rejected[one] for rejected in taken]
            states = OPS["advance"].rowwise(*states, rows[one], kv_lens[one], sampled, index[one], *back)
        expected = OPS["advance"].rowwise(*sample.args)
        assert all(equal(left, right) for left, right in zip(states, expected, strict=True))


STATEFUL = sorted(name for name, op in OPS.items() if op.states)
FUSED = sorted(name for name, op in OPS.items() if op.decompose)


@pytest.mark.parametrize("axis", [0, 2])
def test_state_movers_against_lists(axis: int) -> None:
    """A page or slot at a time, all read before any is written: a rotation of three, and one that is copied away."""
    state = torch.randn(7, 3, 7, generator=generator())
    sources, targets = [1, 4, 2, 6], [4, 2, 1, 0]
    for name, cleared in (("state_copy", []), ("state_move", [6])):
        parts = list(state.unbind(axis))
        for source, target in zip(sources, targets, strict=True):
            parts[target] = state.select(axis, source)
        for place in cleared:
            parts[place] = torch.zeros_like(parts[place])
        found = OPS[name].reference(state, torch.tensor(sources), torch.tensor(targets), axis=axis)
        assert equal(found, torch.stack(parts, axis)), name
    zeroed = [part * (place not in (0, 5)) for place, part in enumerate(state.unbind(axis))]
    assert equal(OPS["state_zero"].reference(state, torch.tensor([5, 0]), axis=axis), torch.stack(zeroed, axis))


def test_ops_that_write_states_say_how_in_place() -> None:
    fused = ("append_attention", "qk_norm_rope_append")
    assert sorted({"advance", "count_tokens", "kv_append", "move_slots", "write_rows", *fused, *MOVERS}) == STATEFUL
    assert FUSED == ["add_rms_norm", "append_attention", "qk_norm_rope_append"]
    assert all((OPS[name].in_place is not None) == bool(OPS[name].states) for name in OPS)


@pytest.mark.parametrize("name", STATEFUL)
@every_dtype
def test_in_place_is_the_pure_form(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.in_place is not None
    for sample in cases(name, dtype):
        pure = results(op.reference(*sample.args, **sample.kwargs))
        given = over_tensors(sample, torch.clone)
        left_over = op.in_place(*given.args, **given.kwargs)
        named = op.bind(given.args, given.kwargs)
        written = [named[state] for state in op.states]
        others = () if left_over is None else results(left_over)
        for found, expected in zip((*others, *written), pure, strict=True):
            assert equal(found, expected)
        for key, before in op.bind(sample.args, sample.kwargs).items():
            assert key in op.states or not isinstance(before, torch.Tensor) or equal(named[key], before)


@pytest.mark.parametrize("name", FUSED)
@every_dtype
def test_decomposition_is_the_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.decompose is not None
    for sample in cases(name, dtype):
        found, expected = op.decompose(*sample.args, **sample.kwargs), op.reference(*sample.args, **sample.kwargs)
        for left, right in zip(results(found), results(expected), strict=True):
            assert equal(left, right)


@every_op
def test_cost_needs_no_data(name: str) -> None:
    op = OPS[name]
    for sample in cases(name, BF16):
        metas = over_tensors(sample, lambda tensor: tensor.to("meta"))
        cost = op.cost(*sample.args, **sample.kwargs)
        assert op.cost(*metas.args, **metas.kwargs) == cost
        assert cost.flops >= 0 and cost.bytes > 0
        assert op.moved(sample.args, sample.kwargs).keys() == set(op.parameters.names)


def test_defining_a_name_twice_is_an_error() -> None:
    with pytest.raises(InternalError, match="op 'linear' is defined twice"):
        define(placement=whole, flops=1, samples=lambda g, dtype: [])(OPS["linear"].reference)


def test_an_op_without_annotations_is_refused() -> None:
    def bare(x, n: int):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(InternalError, match=r"signature of op 'bare'[\s\S]*Parameter x"):
        define(placement=whole, flops=1, samples=lambda g, dtype: [])(bare)
    assert "bare" not in OPS


def test_op_of_knows_its_own_only() -> None:
    assert op_of(torch.ops.aten.add.Tensor) is None
    assert op_of("ingot.linear") is None
    assert op_of(torch.ops.ingot.linear) is None  # a packet is not a target


@pytest.mark.parametrize("missing", ["placement", "flops", "samples"])
def test_an_op_says_how_it_lies_on_a_mesh_and_what_it_costs(missing: str) -> None:
    said: dict[str, Any] = {"placement": whole, "flops": 1, "samples": lambda g, dtype: []}
    del said[missing]
    with pytest.raises(TypeError, match=f"'{missing}'"):
        define(**said)
