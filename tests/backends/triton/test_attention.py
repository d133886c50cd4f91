"""Attention kernels against their references: any mix of sequences, every option, every size of head."""

import itertools
import random
from typing import Any

import pytest
import torch
from paged_steps import Heads, PagedStep
from triton_attention import (
    CORES,
    FACTOR,
    GROUPED,
    Mix,
    a_step,
    agree,
    appended,
    attention_dtypes,
    over_pages,
    rotations,
)
from triton_schedules import DEVICE, new_schedule, run_lowering, some

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.attention.form_tiles import form_tiles
from ingot.backends.triton.lower.attention.paged import LOWERINGS
from ingot.backends.triton.lower.attention.shapes import attention_of
from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.table import LOWERINGS as ALL
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.masks import Mask
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

MIXES: dict[str, Mix] = {
    "one": [(1, 300)],
    "first": [(1, 0)],
    "several": [(1, 5), (1, 400), (1, 16), (1, 0), (1, 33)],
    "chunks": [(3, 40), (1, 130), (5, 0), (0, 12)],
    "a prompt": [(18, 0)],
}


def filled(step: PagedStep) -> torch.Tensor:
    """The cache with what the step feeds, by the kernel that writes it, to the bit."""
    given = (step.kv, step.k, step.v, step.slots)
    (found,) = run_lowering(OPS["kv_append"], ALL["kv_append"], given, {}, dims={"T": len(step.q)})
    expected = OPS["kv_append"].reference(*given)
    assert torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    return expected


def a_call(dim: int = 64, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None) -> Call:
    """`paged_attention` of 4 heads of q over 2 of a cache in f32."""
    q = TensorType(dtype, ("T", 4, dim), strides)
    kv = TensorType(torch.float32, ("pages", 2, 16, 2, dim))
    ints = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    types = {"q": q, "kv": kv, "page_table": TensorType(torch.int32, ("B", "P")), **ints}
    values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    return Call("paged_attention", values, {"scale": 1.0}, (TensorType(dtype, ("T", 4, dim)),))


@pytest.mark.one_in(2)
@attention_dtypes
@pytest.mark.parametrize(("mix", "padded"), some(3, itertools.product(MIXES, (False, True))))
def test_any_mix_of_sequences(mix: str, padded: bool, dtype: torch.dtype) -> None:
    step = a_step(MIXES[mix], dtype, **({"gap": 2, "behind": 3} if padded else {}))
    appended(step, 32 if len(step.q) > 1 else 1)
    over_pages(step, 2048 if padded else 64)


@attention_dtypes
def test_more_sequences_than_a_warp_holds(dtype: torch.dtype) -> None:
    mix = [(place % 3 != 1, 7 * place % 50) for place in range(34)]
    step = a_step([(int(fed), before) for fed, before in mix], dtype, Heads(1, 1, 64), page=32)
    appended(step, 64)
    over_pages(step, 2048)


# Prompts of several blocks, of one that is full, and short ones; decoding, with long contexts and none; nothing fed.
MIXED: Mix = [(33, 20), (1, 300), (1, 0), (0, 7), (32, 0), (1, 240), (2, 5)]


@attention_dtypes
@pytest.mark.parametrize(
    ("heads", "options"),
    some(1, [(GROUPED, {"mask": "window_30"}), (Heads(3, 1, 80), {}), (Heads(2, 2, 128), {"soft_cap": 1.5})]),
)
def test_prompts_beside_decoding(heads: Heads, options: dict[str, Any], dtype: torch.dtype) -> None:
    sinks = torch.linspace(-1.0, 3.0, heads.q).to(dtype) if "soft_cap" in options else None
    over_pages(a_step(MIXED, dtype, heads, gap=1, behind=40), 2048, sinks, **options)


@attention_dtypes
def test_more_sequences_than_are_looked_at_together(dtype: torch.dtype) -> None:
    """Sequences for two looks of 128; short prompts, which are more blocks than there are programs."""
    mix = [({3: 1, 6: 2}.get(place % 10, 0), place % 20) for place in range(137)]
    over_pages(a_step(mix, dtype, Heads(1, 1, 16), behind=1), 2048)


def one_launch(step: PagedStep, nth: int, *buffers: str) -> list[torch.Tensor]:
    """Attention as one launch of a step that feeds prompts leaves it, and these buffers."""

    def lowering(call: Call, schedule: Schedule) -> tuple[Value, ...]:
        results = LOWERINGS["paged_attention"](call, schedule)
        schedule.launches[:] = [schedule.launches[nth]]
        return *results, *(Value(TensorType(torch.float32, ()), buffer=name) for name in buffers)

    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    found = run_lowering(
        OPS["paged_attention"], lowering, (step.q, kv, *step.lens), {"scale": 0.125},
        tokens=(65, 2048), dims=step.dims, cores=CORES,
    )  # fmt: skip
    return [one.cpu() for one in found]


def test_each_row_is_written_by_one_launch() -> None:
    step = a_step(MIXED, torch.float32, Heads(1, 1, 64), gap=1, behind=40)
    decodes = torch.zeros(len(step.q), dtype=torch.bool)
    decodes[step.q_starts[step.q_lens == 1]] = True
    for nth, rows in enumerate((~decodes, decodes)):
        written = ~one_launch(step, nth)[0].isnan()
        assert torch.equal(written, rows[:, None, None].expand_as(written))


def test_prompts_leave_all_splits_to_decoding() -> None:
    """Only what decodes is counted where contexts are cut: here, one of three blocks of keys."""
    few, many = (a_step([(prompt, 300), (1, 190)], torch.float32, Heads(1, 1, 64)) for prompt in (2, 64))
    splits = [(~one_launch(step, 1, "scratch1")[1][1].isnan()).sum().item() for step in (few, many)]
    assert splits == [3, 3]


def test_what_decoding_leaves_behind_is_by_sequences() -> None:
    """Not by tokens, of which a step that feeds prompts has more."""
    schedule = new_schedule((65, 2048), sequences=32)
    LOWERINGS["paged_attention"](a_call(), schedule)
    prefill, decode = schedule.launches
    shapes = {buffer.kind: buffer.shape for buffer in schedule.buffers.values()}
    assert shapes["scratch"][:2] == ("B", 2) and shapes["counter"] == (32, 2)
    (choice,) = schedule.choices
    assert (choice.problem["tokens"], choice.problem["append"]) == (32, False)
    assert evaluate(decode.grid[0], {"T": 2048, "B": 32}) < 2048
    # However many sequences there are, no more programs for them than for full blocks.
    assert evaluate(prefill.grid[1], {"T": 2048, "B": 1000}) == 2 * 2048 // 32
    alone = new_schedule((65, 2048), sequences=1)
    LOWERINGS["paged_attention"](a_call(), alone)
    assert len(alone.launches) == 1


@attention_dtypes
@pytest.mark.parametrize(
    "heads",
    some(2, [Heads(3, 1, 80), Heads(6, 2, 96), Heads(2, 2, 128), Heads(2, 1, 256), Heads(17, 1, 64), Heads(71, 1, 64)]),
)
def test_sizes_of_heads(heads: Heads, dtype: torch.dtype) -> None:
    step = a_step([(1, 75), (2, 30), (1, 150)], dtype, heads)
    appended(step, 16)
    over_pages(step, 128)


@attention_dtypes
@pytest.mark.parametrize("most", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_long_contexts_get_more_splits_than_short_ones(most: int, dtype: torch.dtype) -> None:
    """A context of 400 among short ones, cut into six: more splits than every token has for certain."""
    step = a_step([(1, 70), (2, 400), (1, 3)], dtype, Heads(2, 1, 64), gap=1)
    args = (step.kv, step.q, step.k, step.v, step.positions, rotations(64), step.slots, *step.lens)
    agree("append_attention", step, args, {"eps": 1e-5, "scale": 0.125}, most, cores=6)
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    agree("paged_attention", step, (step.q, kv, *step.lens), {"scale": 0.125}, most, cores=6)


@attention_dtypes
def test_a_split_to_spare_takes_what_is_fed(dtype: torch.dtype) -> None:
    """A context of three chunks, or of one, for eight splits."""
    heads = Heads(2, 1, 64)
    for before in (130, 20):
        step = a_step([(1, before)], dtype, heads)
        args = (step.kv, step.q, step.k, step.v, step.positions, rotations(64), step.slots, *step.lens)
        sinks = torch.tensor([2.0, -1.0]).to(dtype)
        agree("append_attention", step, (*args, None, None, sinks), {"eps": 1e-5, "scale": 0.125}, 1, cores=4)


@attention_dtypes
def test_more_splits_than_are_added_at_once(dtype: torch.dtype) -> None:
    heads = Heads(32, 1, 128)  # a result of which fills a tile
    appended(a_step([(1, 250)], dtype, heads), 1)
    appended(a_step([(1, 300)], dtype, heads), 16)


@attention_dtypes
@pytest.mark.parametrize("most", [1, 16, 64, 2048])
def test_splits_that_another_launch_merges(most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, sequences of one split, of several and without tokens, and the log-sum-exps of both."""
    monkeypatch.setattr("ingot.backends.triton.lower.attention.split_limits._APART", 0)
    mix = [(1, 300)] if most == 1 else [(1, 250), (3, 40), (1, 3), (0, 20), (1, 400)]
    step = a_step(mix, dtype, Heads(6, 2, 64), gap=most > 1, behind=2 * (most > 1))
    if most <= 64:
        appended(step, most, cores=6)
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    agree("paged_attention", step, (step.q, kv, *step.lens), {"scale": 0.125}, most, cores=6)
    agree("partial_attention", step, (step.q, kv, *step.lens), {"scale": 0.125}, most, cores=6)


@attention_dtypes
@pytest.mark.parametrize("page", some(1, [8, 32, 48]))
def test_sizes_of_pages(page: int, dtype: torch.dtype) -> None:
    step = a_step([(1, 75), (2, 30), (1, 150)], dtype, page=page)
    appended(step, 16)
    over_pages(step, 128)


@attention_dtypes
@pytest.mark.parametrize("window", some(1, [1, 5, 100]))
def test_window(window: int, dtype: torch.dtype) -> None:
    step = a_step([(1, 200), (4, 100), (1, 3)], dtype)
    appended(step, 16, mask=f"window_{window}")
    over_pages(step, 128, mask=f"window_{window}")


@attention_dtypes
def test_sinks_and_soft_cap(dtype: torch.dtype) -> None:
    step = a_step([(1, 300), (3, 10)], dtype)
    sinks = torch.tensor([3.0, -1.0, 0.5, 8.0]).to(dtype)
    appended(step, 16, None, None, sinks, mask="window_90", soft_cap=1.5)
    for most in (16, 128):
        over_pages(step, most, sinks, soft_cap=1.5)


@pytest.mark.one_in(3)
@attention_dtypes
@pytest.mark.parametrize(
    ("normed", "rotary", "interleaved"),
    some(5, itertools.product((None, "same", "wide", "last"), (64, 24), (False, True))),
)
def test_norm_and_rotation(normed: str | None, rotary: int, interleaved: bool, dtype: torch.dtype) -> None:
    step = a_step([(1, 20), (2, 4)], dtype)
    g = torch.Generator().manual_seed(5)
    kind = torch.float32 if normed == "wide" else dtype
    weights = [torch.randn(64, generator=g).to(kind) for _ in range(2)] if normed else []
    appended(step, 16, *weights, rotary=rotary, interleaved=interleaved, norm_last=normed == "last")


@attention_dtypes
@pytest.mark.parametrize("name", some(1, LOWERINGS))
def test_samples_of_the_ops(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(6), dtype):
        expected = op.reference(*sample.args, **sample.kwargs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = run_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, tokens=(1, 16), cores=CORES)
        for one, other in zip(found, expected, strict=True):
            assert compare(one, other, dtype, factor=FACTOR[dtype]) is None


@attention_dtypes
@pytest.mark.parametrize(
    "mask", some(1, ["chunked_16", "chunked_100", "bidirectional", "block_causal_8", "block_causal_30"])
)
def test_masks(mask: str, dtype: torch.dtype) -> None:
    """Chunks and blocks end within a tile of queries, within a tile of keys, within a page, and after all of them."""
    step = a_step([(5, 0), (1, 90), (3, 30), (1, 5), (1, 16)], dtype)
    over_pages(step, 128, mask=mask)
    if not Mask.named(mask).looks_ahead:
        appended(step, 16, mask=mask)
    over_pages(a_step(MIXED, dtype, Heads(2, 1, 64), gap=1, behind=40), 2048, mask=mask)


@attention_dtypes
@pytest.mark.parametrize(("most", "heads"), some(1, itertools.product((16, 2048), (GROUPED, Heads(3, 1, 80)))))
def test_trees(most: int, heads: Heads, dtype: torch.dtype) -> None:
    """Nodes that see some of those before them, up to the 64th, beside tokens that are none."""
    step, draw = a_step([(7, 90), (64, 5), (1, 33), (3, 0), (70, 3)], dtype, heads, gap=1, behind=2), random.Random(1)
    ancestors = torch.zeros(len(step.q), dtype=torch.int64)
    for start, count in zip(step.q_starts.tolist(), step.q_lens.tolist(), strict=True):
        for node in range(count if count <= 64 else 0):
            bits = draw.getrandbits(node) | 1 << node
            ancestors[start + node] = bits - (1 << 64) if bits >> 63 else bits
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    sinks = torch.linspace(-1.0, 3.0, heads.q).to(dtype) if heads.q == 4 else None
    options = {"scale": heads.dim**-0.5, "mask": "tree"}
    agree("paged_attention", step, (step.q, kv, *step.lens, sinks, ancestors), options, most)


@attention_dtypes
@pytest.mark.parametrize(
    ("most", "cores", "heads"),
    some(1, [(*one, heads) for one in ((16, 6), (64, CORES), (2048, CORES)) for heads in (GROUPED, Heads(3, 1, 80))]),
)
def test_parts_put_together(most: int, cores: int, heads: Heads, dtype: torch.dtype) -> None:
    """A beginning that all tokens see, of some sequences none, and what follows by a causal mask: their log-sum-exps
    make attention over all of it, also of a beginning that is shorter than what its sequence feeds."""
    step = a_step([(1, 250), (3, 40), (1, 3), (5, 16), (0, 20)], dtype, heads, gap=1, behind=2)
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    table, starts, lens, kv_lens = step.lens
    first = torch.minimum((kv_lens - lens).clamp(min=0) // 16, torch.tensor(7)).int()
    rest = torch.stack([row.roll(-int(count)) for row, count in zip(table, first, strict=True)])
    parts = []
    for lengths, pages, mask in ((16 * first, table, "bidirectional"), (kv_lens - 16 * first, rest, "causal")):
        args, options = (step.q, kv, pages, starts, lens, lengths), {"scale": heads.dim**-0.5, "mask": mask}
        found = run_lowering(
            OPS["partial_attention"], LOWERINGS["partial_attention"], args, options,
            tokens=(1, most), dims=step.dims, cores=cores,
        )  # fmt: skip
        parts.append([one.cpu() for one in found])
        expected = OPS["partial_attention"].reference(*args, **options)
        for one, other, tolerance in zip(parts[-1], expected, (dtype, torch.float32), strict=True):
            assert compare(one, other, tolerance, factor=max(2.0, FACTOR[dtype])) is None
    merged, _ = OPS["merge_attention"].reference(*parts[0], *parts[1])
    whole = OPS["paged_attention"].reference(step.q, kv, *step.lens, scale=heads.dim**-0.5)
    problem = compare(merged, whole, dtype, factor=2 * FACTOR[dtype])
    assert problem is None, problem


@attention_dtypes
def test_nan_stays_with_its_sequence(dtype: torch.dtype) -> None:
    step = a_step([(1, 40), (1, 40)], dtype)
    step.q[0] = float("nan")
    args = (step.q, OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots), *step.lens)
    for most in (16, 128):
        found = run_lowering(
            OPS["paged_attention"], LOWERINGS["paged_attention"], args, {"scale": 0.1}, tokens=(1, most),
            dims={"T": 2, "B": 2}, cores=CORES,
        )[0]  # fmt: skip
        assert bool(found[0].isnan().all()) and bool(found[1].isfinite().all())


# Values that are narrower than keys and wider, beside them and the first of them; keys in one tile and in two; groups
# of more heads than a tile has. The last are those of DeepSeek's prompts and latent caches.
FORMS = [
    Heads(4, 2, 48, 32),
    Heads(3, 1, 17, 40),
    Heads(4, 2, 40, 32, shared=True),
    Heads(36, 1, 24, 12, shared=True),
    Heads(2, 1, 16, 16, shared=True),
    Heads(2, 2, 192, 128),
    Heads(34, 1, 576, 512, shared=True),
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"mask": "window_30"},
    {"mask": "chunked_20", "soft_cap": 1.5},
    {"mask": "bidirectional"},
    {"mask": "block_causal_8", "sinks": True},
]


@attention_dtypes
@pytest.mark.parametrize(("heads", "options"), some(3, itertools.product(FORMS, OTHERS)))
def test_every_form_of_cache(heads: Heads, options: dict[str, Any], dtype: torch.dtype) -> None:
    """In steps of one token, of few and of many."""
    options = {**heads.options, **options}
    sinks = torch.linspace(-1.0, 2.0, heads.q).to(dtype) if options.pop("sinks", False) else None
    mixes: list[tuple[Mix, int]] = [([(1, 90)], 1), ([(1, 70), (3, 20)], 32), ([(19, 30), (0, 4), (1, 65)], 2048)]
    for mix, most in mixes[1:] if DEVICE == "cpu" and heads.dim > 100 else mixes:
        step = a_step(mix, dtype, heads, gap=1)
        args = (step.q, filled(step), *step.lens, sinks)
        agree("paged_attention", step, args, options, most)
        if most > 1 and heads.dim < 100:
            agree("partial_attention", step, args, options, most)


def test_tiles_fit_or_are_refused_by_name() -> None:
    """Of DeepSeek's latent cache, for the kernels of few tokens, of prompts and of deterministic steps."""
    q, kv = (TensorType(torch.bfloat16, shape) for shape in (("T", 128, 576), ("pages", 1, 16, 1, 576)))
    call = a_call()
    types = {"q": q, "kv": kv}
    values = {
        name: Value(types.get(name, value.type), input=value.input) for name, value in call.values.items() if value
    }
    latent = Call(
        "paged_attention", values, {"scale": 1.0, "value_width": 512}, (TensorType(q.dtype, ("T", 128, 512)),)
    )
    attention = attention_of(latent, 90)
    for sums, rows in ((1, 64), (2, 32)):
        tiles = form_tiles(attention.tile_widths(sums), 90, latent.want, 64)
        assert (tiles.rows, tiles.warps) == (rows, 8) and tiles.keys >= 16
        assert attention.tile_widths(sums).shared(tiles.rows, tiles.keys) <= shared_memory(90)
    for tokens, invariant in (((1, 16), False), ((65, 128), False), ((1, 16), True)):
        LOWERINGS["paged_attention"](latent, new_schedule(tokens, sm=86, invariant=invariant))
        with pytest.raises(
            Refused, match=r"the smallest tiles take 111616 bytes of shared memory, and a block has 101376"
        ):
            float32 = {"q": Value(TensorType(torch.float32, q.shape), input=0)}
            float32["kv"] = Value(TensorType(torch.float32, kv.shape), input=1)
            wide = Call(latent.op, {**values, **float32}, latent.attributes, latent.results)
            LOWERINGS["paged_attention"](wide, new_schedule(tokens, sm=86, invariant=invariant))


def test_refusals() -> None:
    two_widths, shared = (
        Call(
            "paged_attention",
            {**a_call(dim).values, "kv": Value(TensorType(torch.float32, shape), input=1)},
            options,
            (),
        )
        for dim, shape, options in (
            (64, ("pages", 1, 16, 2, 64 + 600), {"scale": 1.0}),
            (1100, ("pages", 1, 16, 2, 1100), {"scale": 1.0, "value_width": 64}),
        )
    )
    for call, form in (
        (two_widths, "keys of 64 numbers and values of 600"),
        (shared, "keys of 1100 numbers, of which"),
    ):
        with pytest.raises(Refused, match=f"{form}.*, and tiles hold up to 512"):
            LOWERINGS["paged_attention"](call, new_schedule())
    refused = {
        "heads of 512 elements, more than 256": a_call(512),
        "dtypes differ: kv f32, q bf16": a_call(64, torch.bfloat16),
        "q is strided along its last axis": a_call(64, strides=(512, 128, 2)),
    }
    for reason, one in refused.items():
        for tokens in ((1, 16), (65, 128)):
            with pytest.raises(Refused, match=reason):
                LOWERINGS["paged_attention"](one, new_schedule(tokens))
    with pytest.raises(Refused, match="the kernel is for steps of up to 64 tokens, and these have 128"):
        LOWERINGS["append_attention"](a_call(), new_schedule((65, 128)))
