"""The cpu backend over caches whose values are of another width than keys, or part of them, and of eight bits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from eight_bit_samples import FLOAT8, INT8, NARROW, UNWRITTEN, eight_bit_samples

from ingot.ir.cache.form import CacheForm
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS

pytestmark = [pytest.mark.xdist_group("cpu-kernels"), pytest.mark.one_in_file(3)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EQUAL = CacheForm(40, 40)
FORMS = [CacheForm(40, 16), CacheForm(17, 33), CacheForm(72, 64, shared=True), CacheForm(16, 5, shared=True)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": "window_9", "soft_cap": 1.5},
    {"mask": "chunked_20"},
    {"mask": "bidirectional", "sinks": True},
    {"mask": "block_causal_6"},
]
# Scales of caches of eight bits; those of values are for forms that hold them apart.
SCALES: list[dict[str, Any]] = [{}, {"k_scale": 0.3, "v_scale": 1.7}]
PER_TOKEN: dict[str, Any] = {"per_token": True}
Library = Mapping[str, Callable[..., Any]]


def paged(
    form: CacheForm,
    counts: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    library: Library,
    scales: Mapping[str, Any] | None = None,
    narrow: torch.dtype = FLOAT8,
) -> tuple[torch.Tensor, ...]:
    """The arguments of attention over pages that `kv_append` has filled; NaN or -128 wherever nothing was written.
    Heads of q, k and v lie in wider products. With `scales` the cache is of eight bits: some keys and values are beyond
    its range, and some are zero."""
    g = torch.Generator().manual_seed(sum(lengths))
    kv_heads, heads, page = 2, 6, 16
    width = max(-(-length // page) for length in lengths)
    table = torch.randperm(len(lengths) * width + 2, generator=g)[: len(lengths) * width].view(-1, width).int()
    held = dtype if scales is None else narrow
    unwritten = UNWRITTEN if held is INT8 else math.nan
    stored = replace(form, per_token=bool(scales and scales.get("per_token")))
    kv = torch.full((len(lengths) * width + 2, *stored.shape(page, kv_heads)[1:]), unwritten, dtype=held)
    if stored.per_token:
        stored.key_scales(kv).fill_(math.nan)
        stored.value_scales(kv).fill_(math.nan)
    for row, length in zip(table, lengths, strict=True):
        both = torch.randn(length + 1, kv_heads, form.key_width + form.value_width + 3, generator=g).to(dtype)
        if scales is not None:
            both[0] *= 1000 * min(scales.values(), default=1.0)
            both[min(3, length), :, : form.key_width // 2] = 1e-30  # far below the rest of the row
            both[-1] = 0
        k, v = both[..., : form.key_width], both[..., form.key_width : form.key_width + form.value_width]
        places = torch.arange(length)
        slots = torch.cat([row[places // page].long() * page + places % page, torch.tensor([-1])])
        args = (k, None if form.shared else v, slots)
        expected = OPS["kv_append"].reference(kv, *args, **(scales or {}))
        assert library["ingot.kv_append"](kv, *args, **(scales or {})) is None
        assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8)), "to the bit, NaN included"
    q = torch.randn(sum(counts) + 2, heads, form.key_width + 7, generator=g).to(dtype)[..., : form.key_width]
    starts = [sum(counts[:b]) for b in range(len(counts))]
    return q, kv, table, *(torch.tensor(one, dtype=torch.int32) for one in (starts, counts, lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_the_float64_reference(
    form: CacheForm, options: dict[str, Any], dtype: torch.dtype, library: Library
) -> None:
    """Steps of few tokens of a sequence by the kernel, of many by torch."""
    options = {"scale": 0.2, **options}
    sinks = [torch.linspace(-1, 2, 6).to(dtype)] if options.pop("sinks", False) else []
    if form.shared:
        options["value_width"] = form.value_width
    for counts, lengths in (([1, 5, 2], [37, 5, 80]), ([40, 1], [61, 20])):
        args = (*paged(form, counts, lengths, dtype, library), *sinks)
        exact = [arg.double() if arg.is_floating_point() else arg for arg in args]
        whole = OPS["paged_attention"].reference(*exact, **options)
        found = library["ingot.paged_attention"](*args, **options)
        assert found.shape == (len(args[0]), 6, form.value_width) and found.is_contiguous()
        assert (problem := compare(found, whole, dtype)) is None, problem
        part, lse = library["ingot.partial_attention"](*args, **options)
        assert (problem := compare(part, whole, dtype)) is None, problem
        wanted = OPS["partial_attention"].reference(*exact, **options)[1]
        assert (problem := compare(lse, wanted, torch.float32, factor=4)) is None, problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("narrow", NARROW, ids=str)
@pytest.mark.parametrize("scales", [*SCALES, PER_TOKEN], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", [EQUAL, FORMS[0], FORMS[2]], ids=str)
def test_caches_of_eight_bits_are_the_float64_reference(
    form: CacheForm,
    options: dict[str, Any],
    scales: dict[str, Any],
    narrow: torch.dtype,
    dtype: torch.dtype,
    library: Library,
) -> None:
    options = {"scale": 0.2, **options}
    sinks = [torch.linspace(-1, 2, 6).to(dtype)] if options.pop("sinks", False) else []
    if form.shared:
        options["value_width"] = form.value_width
        scales = {name: 0.3 if name != "per_token" else given for name, given in scales.items()}
    options |= scales
    for counts, lengths in (([1, 5, 2], [37, 5, 80]), ([40, 1], [61, 20])):
        args = (*paged(form, counts, lengths, dtype, library, scales, narrow), *sinks)
        assert bool((args[1].float().nan_to_num().abs() == (448 if narrow is FLOAT8 else 127)).any())
        exact = [arg.double() if arg.dtype is dtype else arg for arg in args]
        wanted, sums = OPS["partial_attention"].reference(*exact, **options)
        found = library["ingot.paged_attention"](*args, **options)
        part, lse = library["ingot.partial_attention"](*args, **options)
        # Values of up to 448 are averaged: the tolerance is for numbers of the size of one.
        factor = float(wanted.abs().max().clamp(min=1))
        assert (problem := compare(found, wanted, dtype, factor=factor)) is None, problem
        assert (problem := compare(part, wanted, dtype, factor=factor)) is None, problem
        assert (problem := compare(lse, sums, torch.float32, factor=100)) is None, problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [None, *SCALES, PER_TOKEN], ids=str)
@pytest.mark.parametrize("form", [EQUAL, FORMS[0], FORMS[2]], ids=str)
def test_slopes_over_every_form_of_cache(
    form: CacheForm, scales: dict[str, Any] | None, dtype: torch.dtype, library: Library
) -> None:
    shared = {"value_width": form.value_width} if form.shared else {}
    if scales is not None and form.shared:
        scales = {name: 0.3 if name != "per_token" else given for name, given in scales.items()}
    options = {"scale": 0.2, **shared, **(scales or {})}
    for counts, lengths in (([1, 5, 2], [37, 5, 80]), ([40, 1], [61, 20])):
        args = (*paged(form, counts, lengths, dtype, library, scales), None, None, None, torch.linspace(0.5, 0.02, 6))
        exact = [arg.double() if arg is not None and arg.dtype is dtype else arg for arg in args]
        wanted = OPS["paged_attention"].reference(*exact, **options)
        factor = float(wanted.abs().max().clamp(min=1))
        problem = compare(library["ingot.paged_attention"](*args, **options), wanted, dtype, factor=factor)
        assert problem is None, problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_to_eight_bits_as_the_reference_rounds_it(dtype: torch.dtype, library: Library) -> None:
    """All codes, the numbers halfway between two of them and their neighbours, what is out of range, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    finite = codes[codes.isfinite()].sort().values
    halfway = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(halfway, torch.tensor(end)) for end in (-math.inf, math.inf)]
    far = torch.tensor([449.0, 464.0, 465.0, 480.0, -1e4, math.inf, -math.inf, math.nan, 1e-4, -1e-9])
    numbers = torch.cat([codes, halfway, *near, far]).to(dtype)
    x = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 16)]).view(1, -1, 16)
    for scales in ({}, {"k_scale": 0.7, "v_scale": 3.1}):
        kv = torch.zeros(1, 2, 1, x.shape[1], 16).to(FLOAT8)
        args = (x, x.flip(1).contiguous(), torch.tensor([0]))
        expected = OPS["kv_append"].reference(kv, *args, **scales)
        library["ingot.kv_append"](kv, *args, **scales)
        assert torch.equal(kv.view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F)
        signs = [one.float().signbit() | one.float().isnan() for one in (kv, expected)]  # a NaN has any
        assert torch.equal(*signs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_every_number_is_rounded_to_int8_as_python_rounds_it(
    scale: float, dtype: torch.dtype, library: Library
) -> None:
    """Halves go to the even neighbour, both ends are 127, and NaN is stored as 0."""
    whole = torch.arange(-131.0, 131.5, 0.5)
    near = [torch.nextafter(whole, torch.tensor(end)) for end in (-math.inf, math.inf)]
    numbers = torch.cat([whole, *near, torch.tensor([1e4, -1e30, math.inf, -math.inf, math.nan, 1e-9])]).to(dtype)
    x = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 16)]).view(1, -1, 16)
    kv = torch.full((1, 2, 1, x.shape[1], 16), UNWRITTEN, dtype=INT8)
    args, scales = (x, x.flip(1).contiguous(), torch.tensor([0])), {"k_scale": scale, "v_scale": 2.0}
    reference = OPS["kv_append"].reference(kv, *args, **scales)
    library["ingot.kv_append"](kv, *args, **scales)
    divided = (x.float() / torch.tensor(scale)).flatten().tolist()
    expected = [0 if math.isnan(one) else round(max(-127.0, min(127.0, one))) for one in divided]
    assert kv[0, 0].flatten().tolist() == expected
    assert torch.equal(reference, kv) and int(kv.min()) == -127


def dequantized(kv: torch.Tensor) -> torch.Tensor:
    """Keys and values of 16 numbers that a cache with scales per token holds."""
    form = CacheForm(16, 16, per_token=True)
    parts = ((form.keys(kv), form.key_scales(kv)), (form.values(kv), form.value_scales(kv)))
    return torch.stack([numbers.float() * scales[..., None] for numbers, scales in parts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fused_write_rounds_to_eight_bits_after_the_dtype_of_keys(dtype: torch.dtype, library: Library) -> None:
    for sample in eight_bit_samples("qk_norm_rope_append", dtype):
        kv = sample.args[0].clone()
        found = library["ingot.qk_norm_rope_append"](kv, *sample.args[1:], **sample.kwargs)
        q, cache = OPS["qk_norm_rope_append"].reference(*sample.args, **sample.kwargs)
        assert (problem := compare(found, q, dtype)) is None, problem
        # A key may lie on the other side of a tie in the model's dtype: one step of eight bits, 1 or a part in eight.
        wide = [one.float() for one in (kv, cache)]
        step = torch.ones(()) if kv.dtype is INT8 else wide[1].abs() / 8 + 2**-9
        if sample.kwargs.get("per_token"):
            wide = dequantized(kv), dequantized(cache)
            step = wide[1].abs().amax(-1, keepdim=True) / (127 if kv.dtype is INT8 else 16)
        assert bool(((wide[0] - wide[1]).abs() <= step).all())
        assert float((wide[0] != wide[1]).float().mean()) < 0.02
