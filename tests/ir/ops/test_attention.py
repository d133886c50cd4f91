"""Attention, pure and paged, against torch's and against attention by hand."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_values import F32, F64, FLOATS, check, generator, ints, randn, two_dtypes
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's attention of the last q.shape[0] positions of one sequence, in float64."""
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    q4, k4, v4 = (tensor.double().transpose(0, 1)[None] for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


HEADS = [(4, 4), (6, 2), (5, 1), (1, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_is_torchs(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    g = generator(heads)
    lengths, dim = [5, 1, 9, 3], 17
    total = sum(lengths)
    q, k, v = (
        randn(g, dtype, total, heads, dim),
        randn(g, dtype, total, kv_heads, dim),
        randn(g, dtype, total, kv_heads, dim),
    )
    expected = torch.cat(
        [sdpa(*parts, 0.3) for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)]
    )
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    seqs = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).int()
    check(OPS["attention"].reference(q, k, v, positions, seqs, scale=0.3, layer=0), expected, dtype)
    # The order of the tokens in a step means nothing: only positions and sequences do.
    order = torch.randperm(total, generator=g)
    args = (q[order], k[order], v[order], positions[order], seqs[order])
    check(OPS["attention"].reference(*args, scale=0.3, layer=7), expected[order], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_paged_attention_is_attention_over_the_whole_sequence(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Three steps of four sequences over permuted pages, with NaN wherever nothing was written."""
    g = generator(7)
    page_size, dim, pages = 4, 9, 40
    steps = [[5, 1, 9, 0], [1, 1, 3, 8], [1, 7, 1, 1]]
    owned = torch.randperm(pages, generator=g)[: 4 * 6].view(4, 6)
    kv = torch.full((pages, 2, page_size, kv_heads, dim), math.nan, dtype=dtype)
    history = {name: [torch.empty(0, kv_heads, dim, dtype=dtype)] * 4 for name in "kv"}
    for lengths in steps:
        total = sum(lengths) + 2  # two rows of padding
        q, k, v = (
            randn(g, dtype, total, heads, dim),
            randn(g, dtype, total, kv_heads, dim),
            randn(g, dtype, total, kv_heads, dim),
        )
        slots, expected, start = torch.full((total,), -1), torch.zeros(total, heads, dim, dtype=F64), 0
        for b, length in enumerate(lengths):
            rows = slice(start, start + length)
            places = history["k"][b].shape[0] + torch.arange(length)
            slots[rows] = owned[b, places // page_size] * page_size + places % page_size
            history["k"][b] = torch.cat([history["k"][b], k[rows]])
            history["v"][b] = torch.cat([history["v"][b], v[rows]])
            if length:
                expected[rows] = sdpa(q[rows], history["k"][b], history["v"][b], 0.3)
            start += length
        kv = OPS["kv_append"].reference(kv, k, v, slots)
        kv_lens = [keys.shape[0] for keys in history["k"]]
        table = owned.int().clone()
        for b, length in enumerate(kv_lens):
            table[b, -(-length // page_size) :] = 2**30  # past a sequence's length the table is never read
        starts = ints(*(sum(lengths[:b]) for b in range(4)))
        found = OPS["paged_attention"].reference(q, kv, table, starts, ints(*lengths), ints(*kv_lens), scale=0.3)
        check(found, expected, dtype)
    written = sum(sum(lengths) for lengths in steps)
    assert int((~kv[:, 0].isnan()).sum()) == int((~kv[:, 1].isnan()).sum()) == written * kv_heads * dim


VARIANTS: list[dict[str, Any]] = [
    {},
    {"mask": "window_3"},
    {"mask": "window_1"},
    {"mask": "window_1000"},
    {"mask": "chunked_4"},
    {"mask": "chunked_1000", "sinks": True},
    {"mask": "bidirectional"},
    {"mask": "block_causal_4"},
    {"mask": "block_causal_3", "soft_cap": 1.5},
    {"soft_cap": 1.5},
    {"sinks": True},
    {"mask": "window_4", "soft_cap": 2.0, "sinks": True},
    {"slopes": True},
    {"mask": "bidirectional", "slopes": True},
    {"mask": "window_4", "soft_cap": 2.0, "sinks": True, "slopes": True},
]
FLAGS = ("sinks", "slopes")  # of a variant, where they say that the op is given such tensors


def given_tensors(
    variant: dict[str, Any], g: torch.Generator, dtype: torch.dtype, heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sinks and slopes of a variant."""
    sinks = randn(g, dtype, heads) if variant.get("sinks") else None
    return sinks, torch.linspace(0.7, 0.1, heads) if variant.get("slopes") else None


def given_options(variant: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variant.items() if name not in FLAGS}


def seen_by_hand(mask: str, place: int, length: int) -> list[int]:
    """The positions of `length` that a query at `place` sees."""
    kind, _, size = mask.rpartition("_")
    rules: dict[str, Callable[[int], bool]] = {
        "causal": lambda key: key <= place,
        "window": lambda key: place - int(size) < key <= place,
        "chunked": lambda key: key <= place and key // int(size) == place // int(size),
        "bidirectional": lambda key: True,
        "block_causal": lambda key: key // int(size) <= place // int(size),
    }
    return list(filter(rules[kind if size.isdigit() else mask], range(length)))


def attention_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    variant: dict[str, Any],
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64, one query and one head at a time: the last q.shape[0] positions of one sequence."""
    q, k, v = q.double(), k.double(), v.double()
    out, group = q.new_empty(*q.shape[:2], v.shape[2]), q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        place = k.shape[0] - q.shape[0] + row
        seen = seen_by_hand(variant.get("mask", "causal"), place, k.shape[0])
        for head in range(q.shape[1]):
            keys, values = (x[seen, head // group] for x in (k, v))
            scores = keys @ q[row, head] * scale
            if "soft_cap" in variant:
                scores = variant["soft_cap"] * torch.tanh(scores / variant["soft_cap"])
            if slopes is not None:
                scores = scores - float(slopes[head]) * (place - torch.tensor(seen, dtype=F64))
            weights = scores.exp()
            rest = 0.0 if sinks is None else float(sinks[head].double().exp())
            out[row, head] = weights @ values / (weights.sum() + rest)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_attention_with_masks_soft_cap_and_sinks(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    g = generator(27)
    lengths, total = [5, 1, 9], 15
    q, k, v = (randn(g, dtype, total, heads, 8) for heads in (6, 2, 2))
    given = given_tensors(variant, g, dtype, 6)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([attention_by_hand(*part, 0.3, variant, *given) for part in parts])
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    seqs = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()
    for function in (OPS["attention"].reference, OPS["attention"].rowwise):
        found = function(q, k, v, positions, seqs, *given, scale=0.3, layer=0, **given_options(variant))
        check(found, expected, dtype)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["soft_cap", "sinks"])
def test_attention_is_gemmas_and_gpt_osss(kind: str, window: int | None) -> None:
    """transformers' eager attention of the two models that these came from, in float32."""
    g = generator(28)
    length, heads, kv_heads = 11, 6, 2
    q, k, v = (randn(g, F32, length, n, 16) for n in (heads, kv_heads, kv_heads))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, -math.inf)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    sinks = randn(g, F32, heads) * 2
    layer = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False, sinks=sinks, head_dim=16)
    args = (q, k, v, torch.arange(length).int(), torch.zeros(length, dtype=torch.int32))
    options: dict[str, Any] = {"scale": 0.7, "layer": 0, "mask": f"window_{window}" if window else "causal"}
    if kind == "soft_cap":
        theirs, _ = gemma2.eager_attention_forward(layer, q4, k4, v4, mask, scaling=0.7, softcap=2.5)
        found = OPS["attention"].reference(*args, **options, soft_cap=2.5)
    else:
        theirs, _ = gpt_oss.eager_attention_forward(layer, q4, k4, v4, mask, scaling=0.7)
        found = OPS["attention"].reference(*args, sinks, **options)
    check(found, theirs[0], F32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_paged_attention_with_masks_soft_cap_and_sinks(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    """Pages of which no query sees anything are never read: their numbers in the table are nonsense."""
    g = generator(29)
    lengths, counts, page, dim = [13, 6, 1], [2, 6, 1], 4, 8
    k, v = ([randn(g, dtype, n, 2, dim) for n in lengths] for _ in range(2))
    q, (sinks, slopes) = randn(g, dtype, 9, 6, dim), given_tensors(variant, g, dtype, 6)
    table = torch.randperm(20, generator=g)[:12].view(3, 4).int()
    kv = torch.full((20, 2, page, 2, dim), math.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        places = torch.arange(length)
        slots = table[b, places // page].long() * page + places % page
        kv = OPS["kv_append"].reference(kv, k[b], v[b], slots)
        unread = min(seen_by_hand(variant.get("mask", "causal"), length - counts[b], length)) // page
        table[b, :unread] = 2**30
        table[b, -(-length // page) :] = 2**30
    parts = zip(q.split(counts), k, v, strict=True)
    expected = torch.cat([attention_by_hand(*part, 0.3, variant, sinks, slopes) for part in parts])
    args = (q, kv, table, ints(0, 2, 8), ints(*counts), ints(*lengths), sinks, None, None, slopes)
    for function in (OPS["paged_attention"].reference, OPS["paged_attention"].rowwise):
        check(function(*args, scale=0.3, **given_options(variant)), expected, dtype)


def test_attention_is_blooms() -> None:
    """What transformers adds to scores are slopes times the position of the key; a softmax does not see the query's."""
    g = generator(30)
    length, heads = 11, 6
    q, k, v = (randn(g, F32, length, heads, 16) for _ in range(3))
    alibi = bloom.build_alibi_tensor(torch.ones(1, length, dtype=torch.int64), heads, F32)
    q3, k3, v3 = (x.transpose(0, 1) for x in (q, k, v))
    scores = alibi.baddbmm(q3, k3.transpose(-1, -2), alpha=0.7)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    theirs = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v3
    args = (q, k, v, torch.arange(length).int(), torch.zeros(length, dtype=torch.int32))
    slopes = bloom._get_alibi_slopes(heads, torch.device("cpu"))
    check(OPS["attention"].reference(*args, None, slopes, scale=0.7, layer=0), theirs.transpose(0, 1), F32)


def test_slopes_that_do_not_fit_are_refused() -> None:
    q, seqs = torch.zeros(3, 4, 8), torch.zeros(3).int()
    for slopes in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, 1)):
        with pytest.raises(VerifyError, match=r"slopes torch\..*\n.*float32 \[4\], by heads"):
            OPS["attention"].fake(q, q, q, seqs, seqs, None, slopes, scale=1.0, layer=0)
    kv, lens = torch.zeros(1, 2, 16, 4, 8), (torch.zeros(1, 1).int(), *(torch.zeros(1).int() for _ in range(3)))
    with pytest.raises(VerifyError, match="slopes with the mask 'tree'"):
        bits = torch.zeros(3, dtype=torch.int64)
        OPS["paged_attention"].fake(q, kv, *lens, None, bits, None, torch.zeros(4), scale=1.0, mask="tree")


# Of keys and values; `shared`: values are the first numbers of keys.
FORMS = [CacheForm(8, 5), CacheForm(5, 9), CacheForm(8, 1), CacheForm(9, 6, shared=True), CacheForm(8, 8, shared=True)]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def drawn_values(form: CacheForm, k: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    if form.shared:
        return k[..., : form.value_width]
    return randn(g, k.dtype, *k.shape[:2], form.value_width)


@pytest.mark.one_in(6)
@two_dtypes
@every_form
@pytest.mark.parametrize("variant", VARIANTS[:2] + VARIANTS[4:5] + VARIANTS[6:9] + VARIANTS[10:], ids=str)
def test_every_form_of_cache(form: CacheForm, variant: dict[str, Any], dtype: torch.dtype) -> None:
    """Pure, and over pages of which what is not written holds NaN; row by row too."""
    g = generator(41)
    lengths, counts, page, kv_heads, heads = [13, 6, 1], [2, 6, 1], 4, 2, 6
    k = [randn(g, dtype, n, kv_heads, form.key_width) for n in lengths]
    v = [drawn_values(form, keys, g) for keys in k]
    q = [randn(g, dtype, n, heads, form.key_width) for n in lengths]
    sinks, slopes = given_tensors(variant, g, dtype, heads)
    options: dict[str, Any] = {"scale": 0.3, **given_options(variant)}
    options |= {"value_width": form.value_width} if form.shared else {}
    expected = [attention_by_hand(*part, 0.3, variant, sinks, slopes) for part in zip(q, k, v, strict=True)]
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    seqs = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()
    pure = (torch.cat(q), torch.cat(k), None if form.shared else torch.cat(v), positions, seqs, sinks, slopes)
    for function in (OPS["attention"].reference, OPS["attention"].rowwise):
        check(function(*pure, layer=0, **options), torch.cat(expected), dtype)
    table = torch.randperm(20, generator=g)[:12].view(3, 4).int()
    kv = torch.full((20, *form.shape(page, kv_heads)[1:]), math.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        places = torch.arange(length)
        slots = table[b, places // page].long() * page + places % page
        kv = OPS["kv_append"].reference(kv, k[b], None if form.shared else v[b], slots)
    assert int((~kv.isnan()).sum()) == sum(lengths) * kv_heads * form.row
    last = [slice(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    args = (torch.cat([rows[part] for rows, part in zip(q, last, strict=True)]), kv, table, ints(0, 2, 8))
    for name, form_of_op in (
        ("paged_attention", "reference"),
        ("paged_attention", "rowwise"),
        ("partial_attention", "rowwise"),
    ):
        rest: tuple[torch.Tensor | None, ...] = (sinks, None, None, slopes)
        if name == "partial_attention":
            if slopes is not None:  # which parts do not have
                continue
            rest = (sinks,)
        found = getattr(OPS[name], form_of_op)(*args, ints(*counts), ints(*lengths), *rest, **options)
        wanted = torch.cat([rows[part] for rows, part in zip(expected, last, strict=True)])
        check(found[0] if isinstance(found, tuple) else found, wanted, dtype)


def test_forms_that_are_none() -> None:
    q, k, v = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 5)
    step = (torch.zeros(3).int(), torch.zeros(3).int())
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, k, None), {}, "attention without values"),
        ((q, k, v), {"value_width": 5}, "with v and with value_width"),
        ((q, k, None), {"value_width": 9}, "values of 9 numbers with keys of 8"),
        ((q, k, None), {"value_width": 0}, "values of 0 numbers with keys of 8"),
        ((q, k[..., :7], v), {}, "q has heads of 8 numbers and k of 7"),
    ]
    for args, options, reason in refused:
        for function in (OPS["attention"].reference, OPS["attention"].fake):
            with pytest.raises(VerifyError, match=reason):
                function(*args, *step, scale=1.0, layer=0, **options)
    lens = (torch.zeros(1, 1).int(), *(torch.zeros(1).int() for _ in range(3)))
    for shape, asked in (((2, 8), 5), ((1, 16), None), ((1, 13), 5), ((1, 8), None), ((2, 7), None), ((3, 8), None)):
        kv = torch.zeros(1, shape[0], 16, 2, shape[1])
        with pytest.raises(VerifyError, match="a cache"):
            OPS["paged_attention"].fake(q, kv, *lens, scale=1.0, value_width=asked)
    with pytest.raises(VerifyError, match=r"keys of 8 numbers and values of 5.*\n.*pages, 1, page, kv_heads, 13"):
        OPS["kv_append"].fake(torch.zeros(1, 2, 16, 2, 8), k, v, torch.zeros(3).long())
    for name in ("qk_norm_rope_append", "append_attention"):  # the fused ops write caches of equal widths
        with pytest.raises(VerifyError, match="keys of 8 numbers and values of 5"):
            OPS[name].fake(torch.zeros(1, 1, 16, 2, 13), q, k, v, eps=1.0)
