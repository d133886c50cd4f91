"""The cpu provider over caches whose values are of another width than keys, or part of them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ingot.ir.cache_form import CacheForm
from ingot.ir.ops import OPS
from ingot.ir.tolerances import compare

pytestmark = pytest.mark.xdist_group("cpu-kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [CacheForm(40, 16), CacheForm(17, 33), CacheForm(72, 64, shared=True), CacheForm(16, 5, shared=True)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": "window_9", "soft_cap": 1.5},
    {"mask": "chunked_20"},
    {"mask": "bidirectional", "sinks": True},
    {"mask": "block_causal_6"},
]
Library = Mapping[str, Callable[..., Any]]


def paged(
    form: CacheForm, counts: list[int], lengths: list[int], dtype: torch.dtype, library: Library
) -> tuple[torch.Tensor, ...]:
    """The arguments of attention over pages that `kv_append` has filled; NaN wherever nothing was written. Heads of
    q, k and v lie in wider products."""
    g = torch.Generator().manual_seed(sum(lengths))
    kv_heads, heads, page = 2, 6, 16
    width = max(-(-length // page) for length in lengths)
    table = torch.randperm(len(lengths) * width + 2, generator=g)[: len(lengths) * width].view(-1, width).int()
    kv = torch.full((len(lengths) * width + 2, *form.shape(page, kv_heads)[1:]), math.nan, dtype=dtype)
    for row, length in zip(table, lengths, strict=True):
        both = torch.randn(length + 1, kv_heads, form.key_width + form.value_width + 3, generator=g).to(dtype)
        k, v = both[..., : form.key_width], both[..., form.key_width : form.key_width + form.value_width]
        places = torch.arange(length)
        slots = torch.cat([row[places // page].long() * page + places % page, torch.tensor([-1])])
        args = (k, None if form.shared else v, slots)
        expected = OPS["kv_append"].reference(kv, *args)
        assert library["ingot.kv_append"](kv, *args) is None
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
