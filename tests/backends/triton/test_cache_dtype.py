"""Kernels over KV caches of eight bits: what they write, to the bit, and the attention over it."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_oracle import rounded_worse, scaled_form
from drawn import drawn_in_one_of
from eight_bit_samples import FLOAT8, INT8, NARROW, OVER_CACHES, UNWRITTEN, eight_bit_samples
from op_values import widened
from paged_steps import Heads
from triton_attention import (
    CORES,
    GROUPED,
    MASKS,
    Mix,
    a_step,
    agree,
    appended,
    attention_dtypes,
    narrowed,
    over_pages,
    rotations,
)
from triton_schedules import DEVICE, new_schedule, run_lowering, some

from ingot.backends.triton.lower.attention.paged import LOWERINGS as ATTENTIONS
from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

# None, one that moves what is rounded, and one in whose range nothing saturates.
SCALES: list[dict[str, Any]] = [{}, {"k_scale": 0.3, "v_scale": 1.7}, {"k_scale": 7.0, "v_scale": 0.004}]
PER_TOKEN: dict[str, Any] = {"per_token": True}
scaled = pytest.mark.parametrize("scales", SCALES, ids=str)
caches = pytest.mark.parametrize("narrow", some(1, NARROW), ids=str)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of eight bits, those halfway between two of them and their neighbours, what is out of range, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    finite = codes[codes.isfinite()].sort().values
    halfway = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(halfway, torch.tensor(end)) for end in (-math.inf, math.inf)]
    far = torch.tensor([449.0, 464.0, 465.0, 480.0, -1e4, math.inf, -math.inf, math.nan, 1e-4, -1e-9])
    return torch.cat([codes, halfway, *near, far]).to(dtype)


def listed(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@scaled
def test_every_number_is_rounded_as_the_reference_rounds_it(scales: dict[str, Any], dtype: torch.dtype) -> None:
    x = numbers(dtype)
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(1, -1, 16)
    kv = torch.zeros(1, 2, 1, x.shape[1], 16).to(FLOAT8)
    args = (kv, x, x.flip(1).contiguous(), torch.tensor([0]))
    expected = OPS["kv_append"].reference(*args, **scales)
    (found,) = run_lowering(OPS["kv_append"], LOWERINGS["kv_append"], args, scales)
    found = found.cpu()
    assert torch.equal(found.view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F)
    signs = [one.float().signbit() | one.isnan() for one in (found, expected)]  # a NaN has any
    assert torch.equal(*signs) and bool(found.isnan().any()) and bool((found.float().abs() == 448).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@scaled
def test_every_number_is_rounded_to_int8_as_the_reference_rounds_it(scales: dict[str, Any], dtype: torch.dtype) -> None:
    whole = torch.arange(-131.0, 131.5, 0.5)
    near = [torch.nextafter(whole, torch.tensor(end)) for end in (-math.inf, math.inf)]
    x = torch.cat([whole, *near, torch.tensor([1e4, -1e30, math.inf, -math.inf, math.nan, 1e-9])]).to(dtype)
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(1, -1, 16)
    args = (torch.full((1, 2, 1, x.shape[1], 16), UNWRITTEN, dtype=INT8), x, x.flip(1).contiguous(), torch.tensor([0]))
    expected = OPS["kv_append"].reference(*args, **scales)
    (found,) = run_lowering(OPS["kv_append"], LOWERINGS["kv_append"], args, scales)
    assert torch.equal(found.cpu(), expected) and int(expected.min()) == -127 and int(expected.max()) == 127


@attention_dtypes
@caches
@pytest.mark.parametrize("name", some(1, OVER_CACHES))
def test_samples(name: str, narrow: torch.dtype, dtype: torch.dtype) -> None:
    """Those of the definitions: forms of caches, masks, gains, trees, shared prefixes."""
    op = OPS[name]
    for sample in eight_bit_samples(name, dtype, caches=(narrow,)):
        if name in ATTENTIONS:
            call = op.bind(sample.args, sample.kwargs)
            step = replace(a_step([(1, 0)], dtype), kv=call["kv"], q=call["q"], q_starts=call["q_starts"])
            agree(name, step, sample.args, sample.kwargs, 64)
        else:
            bound = op.bind(sample.args, sample.kwargs)
            dims = {"T": len(bound["q"] if "q" in bound else bound["k"])}
            found = run_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims=dims)
            truths = (op.reference(*args, **sample.kwargs) for args in (sample.args, widened(sample.args)))
            for given in zip(found, *map(listed, truths), strict=True):
                # A norm that rounds the other way is turned into both elements of a pair, one of which may be small.
                factor, form = 1.0 if dtype is torch.float32 else 8.0, scaled_form(name, sample.args, sample.kwargs)
                problem = rounded_worse(given[0].cpu(), *given[1:], factor, form)
                assert problem is None, problem


# Prompts of several blocks and a short one, decoding with and without a context, a sequence that feeds nothing.
MIXED: Mix = [(33, 20), (1, 140), (1, 0), (0, 7), (2, 5)]


@attention_dtypes
@pytest.mark.parametrize(
    ("mask", "scales", "narrow"),
    [*some(1, itertools.product(MASKS, SCALES[1:], NARROW)), *some(1, itertools.product(MASKS, [PER_TOKEN], NARROW))],
)
def test_every_mask(mask: str, scales: dict[str, Any], narrow: torch.dtype, dtype: torch.dtype) -> None:
    """In steps of few tokens, of prompts beside decoding, and in deterministic ones, with sinks and a cap."""
    few = narrowed(a_step([(5, 0), (1, 90), (3, 30)], dtype), scales, narrow)
    sinks = torch.linspace(-1.0, 3.0, GROUPED.q).to(dtype)
    over_pages(few, 16, sinks, mask=mask, soft_cap=1.5, **scales)
    mixed = narrowed(a_step(MIXED, dtype, Heads(2, 1, 64), gap=1, behind=3), scales, narrow)
    over_pages(mixed, 2048, mask=mask, **scales)
    over_pages(few, 16, sinks, mask=mask, invariant=True, **scales)
    if mask not in ("bidirectional", "block_causal_8"):
        appended(few, 16, None, None, sinks, mask=mask, soft_cap=1.5, **scales)


@pytest.mark.parametrize("scales", [*some(1, SCALES), PER_TOKEN], ids=str)
@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_of_sixteen_bits(dtype: torch.dtype, narrow: torch.dtype, scales: dict[str, Any]) -> None:
    """They are multiplied with keys and values in float16, also in the interpreter, which cannot multiply bfloat16.

    Queries are larger than float16 can be, and zero.
    """
    step = narrowed(a_step([(5, 0), (1, 90), (3, 30)], dtype), scales, narrow)
    large = 2.0**20 if dtype is torch.bfloat16 else 1.0
    queries = replace(step, q=step.q.index_fill(0, torch.tensor([5]), 0.0) * large)
    # Without pairs, values with scales per token are multiplied in bfloat16.
    multiplies = dtype is torch.float16 or DEVICE != "cpu"
    for invariant in (False, True) if multiplies or not scales.get("per_token") else (False,):
        over_pages(queries, 16, invariant=invariant, scale=step.q.shape[2] ** -0.5 / large, **scales)
    if multiplies:
        appended(step, 16, None, None, **scales)


@attention_dtypes
def test_trees(dtype: torch.dtype) -> None:
    step = narrowed(a_step([(7, 90), (1, 33)], dtype, gap=1, behind=2), SCALES[1])
    bits = torch.zeros(len(step.q), dtype=torch.int64)
    bits[:7] = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100001, 0b1001011])
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots, **SCALES[1])
    args = (step.q, kv, *step.lens, None, bits)
    for most in (16, 2048):
        agree("paged_attention", step, args, {"scale": 0.125, "mask": "tree", **SCALES[1]}, most)


@attention_dtypes
@caches
@pytest.mark.parametrize(
    ("heads", "scales"),
    some(
        1,
        [
            (GROUPED, SCALES[0]),
            (Heads(3, 1, 80), SCALES[1]),
            (Heads(6, 2, 96), SCALES[2]),
            (Heads(17, 1, 128), SCALES[0]),
            (Heads(2, 1, 256), SCALES[1]),
            *((Heads(2, 1, dim), PER_TOKEN) for dim in (30, 64, 128, 256)),
        ],
    ),
    ids=str,
)
def test_sizes_of_heads(heads: Heads, scales: dict[str, Any], narrow: torch.dtype, dtype: torch.dtype) -> None:
    """Contexts in several splits, the longest in more than short ones; several tokens of a sequence in one step."""
    step = narrowed(a_step([(1, 75), (2, 30), (1, 150), (1, 0)], dtype, heads, gap=1), scales, narrow)
    appended(step, 16, cores=6, **scales)
    over_pages(step, 16, **scales)
    over_pages(step, 128, **scales)


@attention_dtypes
@caches
@pytest.mark.parametrize("scales", [SCALES[1], PER_TOKEN], ids=str)
def test_one_token_that_is_normed(scales: dict[str, Any], narrow: torch.dtype, dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 64)
    for mix in ([(1, 300)], [(1, 0)]):
        step = narrowed(a_step(mix, dtype, heads), scales, narrow)
        gains = [torch.linspace(0.5, 1.5, 64).to(dtype)] * 2
        appended(step, 1, *gains, rotary=24, **scales)


# Values narrower than keys, wider, and the first of them; a latent cache, and one of two tiles.
FORMS = [
    Heads(4, 2, 48, 32),
    Heads(3, 1, 17, 40),
    Heads(4, 2, 40, 32, shared=True),
    Heads(36, 1, 24, 12, shared=True),
    Heads(2, 1, 16, 16, shared=True),
    Heads(2, 2, 192, 128),
]
# The sizes of a published latent cache, with both kinds of scales. The interpreter takes seven seconds.
LATENT = [(Heads(34, 1, 576, 512, shared=True), per_token) for per_token in (False, True)]


@attention_dtypes
@caches
@pytest.mark.parametrize(
    ("heads", "per_token"),
    [
        *some(2, itertools.product(FORMS, [False, True])),
        *(drawn_in_one_of(4, LATENT) if DEVICE == "cpu" else LATENT),
    ],
    ids=str,
)
def test_every_form_of_cache(heads: Heads, per_token: bool, narrow: torch.dtype, dtype: torch.dtype) -> None:
    """What fills it is written by the kernel that does, to the bit."""
    scales = PER_TOKEN if per_token else {"k_scale": 0.3, "v_scale": 0.3 if heads.shared else 1.7}
    if per_token and not heads.shared:
        heads = replace(heads, dim=heads.dim + -(heads.dim + heads.value) % 4)
    for mix, most, invariant in (
        ([(1, 70), (3, 20)], 32, False),
        ([(19, 30), (0, 4), (1, 65)], 2048, False),
        ([(1, 40), (3, 20)], 32, True),
    ):
        step = narrowed(a_step(mix, dtype, heads, gap=1), scales, narrow)
        given = (step.kv, step.k, step.v, step.slots)
        (found,) = run_lowering(OPS["kv_append"], LOWERINGS["kv_append"], given, scales, dims={"T": len(step.q)})
        kv = OPS["kv_append"].reference(*given, **scales)
        assert torch.equal(found.cpu().view(torch.uint8), kv.view(torch.uint8)), "to the bit, NaN included"
        options = {**heads.options, **scales}
        for name in ("paged_attention", "partial_attention"):
            agree(name, step, (step.q, kv, *step.lens), options, most, invariant=invariant)


@attention_dtypes
@pytest.mark.parametrize(("most", "cores"), [(16, 6), (2048, CORES)])
@pytest.mark.parametrize(("scales", "narrow"), some(1, itertools.product([SCALES[1], PER_TOKEN], NARROW)), ids=str)
def test_parts_put_together(
    scales: dict[str, Any], narrow: torch.dtype, most: int, cores: int, dtype: torch.dtype
) -> None:
    """The scale of values is in each part, and not in the log-sum-exp that puts them together."""
    step = narrowed(a_step([(1, 130), (3, 40), (1, 3), (0, 20)], dtype, gap=1, behind=2), scales, narrow)
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots, **scales)
    pages, starts, lens, kv_lens = step.lens
    first = torch.minimum((kv_lens - lens).clamp(min=0) // 16, torch.tensor(3)).int()
    rest = torch.stack([row.roll(-int(count)) for row, count in zip(pages, first, strict=True)])
    parts = []
    for lengths, own, mask in ((16 * first, pages, "bidirectional"), (kv_lens - 16 * first, rest, "causal")):
        args, options = (step.q, kv, own, starts, lens, lengths), {"scale": 0.125, "mask": mask, **scales}
        agree("partial_attention", step, args, options, most, cores)
        parts += OPS["partial_attention"].reference(*args, **options)
    merged, _ = OPS["merge_attention"].reference(*parts)
    whole = agree("paged_attention", step, (step.q, kv, *step.lens), {"scale": 0.125, **scales}, most, cores)
    assert torch.allclose(merged, whole, rtol=0.1, atol=0.1), "parts and the whole are of one scale"


@attention_dtypes
def test_nan_of_a_token_is_cached_and_stays_with_its_sequence(dtype: torch.dtype) -> None:
    step = a_step([(1, 40), (1, 40)], dtype)
    step = narrowed(step, {})
    step.k[1] = float("nan")
    args = (step.kv, step.q, step.k, step.v, step.positions, rotations(64), step.slots, *step.lens)
    found, cache = run_lowering(
        OPS["append_attention"], ATTENTIONS["append_attention"], args, {"eps": 1e-5, "scale": 0.1},
        dims=step.dims, cores=CORES,
    )  # fmt: skip
    assert bool(found[0].isfinite().all()) and bool(found[1].isnan().all())
    page, offset = divmod(int(step.slots[1]), 16)
    assert bool(cache[page, 0, offset].isnan().all()) and not bool(cache[page, 1, offset].isnan().any())


@attention_dtypes
@caches
def test_a_row_with_nan_or_infinity_is_nan_in_its_own_sequence_alone(narrow: torch.dtype, dtype: torch.dtype) -> None:
    """With scales per token, i8 as well: the scale of the row is NaN."""
    for odd in (math.nan, math.inf):
        step = narrowed(a_step([(1, 40), (1, 40)], dtype), PER_TOKEN, narrow)
        step.k[0], step.v[0] = 1.0, 1.0  # of no size that the table of tolerances is not for
        step.k[1, :, 5] = odd
        args = (step.kv, step.q, step.k, step.v, step.positions, rotations(64), step.slots, *step.lens)
        found, cache = run_lowering(
            OPS["append_attention"], ATTENTIONS["append_attention"], args, {"eps": 1e-5, "scale": 0.1, **PER_TOKEN},
            dims=step.dims, cores=CORES,
        )  # fmt: skip
        assert bool(found[0].isfinite().all()) and bool(found[1].isnan().all())
        form = CacheForm.of(step.k, step.v, per_token=True)
        page, offset = divmod(int(step.slots[1]), 16)
        assert bool(form.key_scales(cache)[page, offset].isnan().all())
        assert bool(form.value_scales(cache)[page, offset].isfinite().all())


def call_over(op: str, dtype: torch.dtype) -> Call:
    """A call over a cache of this dtype."""
    q, kv = TensorType(torch.bfloat16, ("T", 4, 64)), TensorType(dtype, ("pages", 2, 16, 2, 64))
    few = TensorType(torch.bfloat16, ("T", 2, 64))
    lens = {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    chosen = TensorType(torch.int32, ("T", 8))
    types = {"kv": kv, "q": q, "k": few, "v": few, "page_table": TensorType(torch.int32, ("B", "P")), **lens}
    types |= {"chosen": chosen} if op == "sparse_attention" else {}
    values: dict[str, Value | None] = {name: Value(one, input=at) for at, (name, one) in enumerate(types.items())}
    return Call(op, values, {"scale": 1.0}, (q,))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("dtype", "sm", "assembly"), [
    (FLOAT8, 89, True), (INT8, 90, True), (INT8, 86, False), (torch.bfloat16, 90, False)
], ids=str)  # fmt: skip
def test_elements_of_eight_bits_are_converted_by_assembly_where_a_gpu_has_the_instructions(
    dtype: torch.dtype, sm: int, assembly: bool, invariant: bool
) -> None:
    for most in (16, 2048):
        schedule = new_schedule((1, most), sm=sm, invariant=invariant)
        ATTENTIONS["paged_attention"](call_over("paged_attention", dtype), schedule)
        assert {launch.constants["ASSEMBLY"] for launch in schedule.launches} == {assembly}


def test_caches_of_other_dtypes_and_gpus_without_eight_bits_are_refused() -> None:
    for op in OVER_CACHES:
        for sm in (80, 86):
            with pytest.raises(Refused, match="a cache of f8e4m3, and kernels for it need sm_89 or newer"):
                LOWERINGS[op](call_over(op, FLOAT8), new_schedule(sm=sm))
        with pytest.raises(Refused, match=r"dtypes differ: kv f16, (q|k) bf16"):
            LOWERINGS[op](call_over(op, torch.float16), new_schedule())
