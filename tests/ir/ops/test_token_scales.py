"""Caches with scales per token: the references of the ops against code that reads and writes bytes, one at a time."""

import math
import struct
from typing import Any

import pytest
import torch

from ingot.ir.cache.dtype import CacheScales, check_cache_dtype
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
HIGHEST = {FLOAT8: 448.0, INT8: 127.0}
FORMS = [
    CacheForm(10, 10, per_token=True),
    CacheForm(8, 4, per_token=True),
    CacheForm(9, 6, shared=True, per_token=True),
]
KV, PAGE = 2, 4


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def e4m3(code: int) -> float:
    """The number of a byte, from its sign, exponent and mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code >> 7 else size


def code_of(value: float, dtype: torch.dtype) -> int:
    """The byte of the nearest number; of two that are as near, the even one."""
    if dtype is INT8:
        return round(max(-127.0, min(127.0, value))) & 0xFF
    codes = [
        code for code in range(256) if not math.isnan(e4m3(code)) and math.copysign(1, value) == (1 - (code >> 7) * 2)
    ]
    return min(codes, key=lambda code: (abs(e4m3(code) - value), code & 1))


def row_of(numbers: list[float], dtype: torch.dtype) -> tuple[list[int], bytes]:
    """The codes of a key or value, and its scale as four bytes."""
    scale = max(f32(max(map(abs, numbers)) / HIGHEST[dtype]), 2.0**-126)
    return [code_of(f32(number / scale), dtype) for number in numbers], struct.pack("<f", scale)


def number_of(code: int, dtype: torch.dtype) -> float:
    return e4m3(code) if dtype is FLOAT8 else (code ^ 0x80) - 0x80


def bytes_at(kv: torch.Tensor, form: CacheForm, slot: int, head: int) -> tuple[list[int], list[int], bytes, bytes]:
    """The codes of the key and the value at a slot, and the bytes of their scales."""
    rows = kv.view(torch.uint8)[slot // PAGE, :, slot % PAGE, head].tolist()
    width = form.key_width
    if form.equal:
        after = -(-width // 4) * 4
        key, value = rows
        return key[:width], value[:width], bytes(key[after : after + 4]), bytes(value[after : after + 4])
    (row,) = rows
    if form.shared:
        after = -(-width // 4) * 4
        scale = bytes(row[after : after + 4])
        return row[:width], row[: form.value_width], scale, scale
    after = width + form.value_width
    return row[:width], row[width:after], bytes(row[after : after + 4]), bytes(row[after + 4 : after + 8])


def keys_and_values(form: CacheForm, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of very different sizes, one of zeros, and halves between two codes."""
    g = torch.Generator().manual_seed(form.key_width)
    k = torch.randn(tokens, KV, form.key_width, generator=g) * torch.logspace(-8, 4, tokens)[:, None, None]
    k[1] = 0.0
    k[2, 0] = torch.arange(form.key_width) + 0.5
    k[2, 0, 0] = 127.0
    if form.shared:
        return k, None
    return k, torch.randn(tokens, KV, form.value_width, generator=g) * torch.logspace(3, -9, tokens)[:, None, None]


def filled(form: CacheForm, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    k, v = keys_and_values(form, 6)
    slots = torch.tensor([9, 2, 0, 7, -1, 4])
    kv = torch.zeros(3, *form.shape(PAGE, KV)[1:], dtype=torch.uint8).fill_(0x55).view(dtype)
    return OPS["kv_append"].reference(kv, k, v, slots, per_token=True), k, k if v is None else v, slots


@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_divided_by_their_largest_magnitude(form: CacheForm, dtype: torch.dtype) -> None:
    kv, k, v, slots = filled(form, dtype)
    for token, slot in enumerate(slots.tolist()):
        for head in range(KV) if slot >= 0 else ():
            key, value, key_scale, value_scale = bytes_at(kv, form, slot, head)
            assert (key, key_scale) == row_of(k[token, head].tolist(), dtype)
            if not form.shared:
                assert (value, value_scale) == row_of(v[token, head].tolist(), dtype)
    written = {slot for slot in slots.tolist() if slot >= 0}
    for slot in set(range(3 * PAGE)) - written:
        assert bool((kv.view(torch.uint8)[slot // PAGE, :, slot % PAGE] == 0x55).all()), "nothing else was written"


@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_multiplies_by_the_scales_of_each_row(form: CacheForm, dtype: torch.dtype) -> None:
    """A sequence of six positions in two pages, and two queries at its end."""
    kv, *_ = filled(form, dtype)
    for slot in set(range(12)) - {9, 2, 0, 7, 4}:
        OPS["kv_append"].in_place(
            kv, *[None if x is None else x[:1] for x in keys_and_values(form, 6)], torch.tensor([slot]), per_token=True
        )
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    q = torch.randn(2, 4, form.key_width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options: dict[str, Any] = {"scale": 0.01, "per_token": True}
    if form.shared:
        options["value_width"] = form.value_width
    ints = [torch.tensor([one], dtype=torch.int32) for one in (0, 2, 6)]
    found = OPS["paged_attention"].reference(q, kv, table, *ints, **options)
    for query in range(2):
        for head in range(4):
            scores, values = [], []
            for place in range(5 + query):
                slot = [2, 0][place // PAGE] * PAGE + place % PAGE
                key, value, key_scale, value_scale = bytes_at(kv, form, slot, head // 2)
                (of_key,), (of_value,) = struct.unpack("<f", key_scale), struct.unpack("<f", value_scale)
                product = sum(
                    a * number_of(b, dtype) * of_key for a, b in zip(q[query, head].tolist(), key, strict=True)
                )
                scores.append(product * 0.01)
                values.append([number_of(one, dtype) * of_value for one in value])
            weights = [math.exp(one - max(scores)) for one in scores]
            mixed = [
                sum(w * row[d] for w, row in zip(weights, values, strict=True)) / sum(weights)
                for d in range(form.value_width)
            ]
            assert found[query, head].tolist() == pytest.approx(mixed, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=str)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_read_as_nan(odd: float, dtype: torch.dtype) -> None:
    form = FORMS[0]
    kv = torch.zeros(1, *form.shape(PAGE, KV)[1:], dtype=torch.uint8).view(dtype)
    k = torch.ones(2, KV, 10)
    k[1, 0, 3] = odd
    kv = OPS["kv_append"].reference(kv, k, torch.ones(2, KV, 10), torch.tensor([0, 1]), per_token=True)
    ints = [torch.tensor([one], dtype=torch.int32) for one in (0, 2, 2)]
    found = OPS["paged_attention"].reference(
        torch.ones(2, KV, 10), kv, torch.zeros(1, 1, dtype=torch.int32), *ints, scale=1.0, per_token=True
    )
    assert found.isnan().all(-1).tolist() == [[False, False], [True, False]]


def test_what_the_form_says() -> None:
    assert CacheForm(128, 128, per_token=True).shape(16, 8) == ("pages", 2, 16, 8, 132)
    assert CacheForm(14, 14, per_token=True).row == 20 and CacheForm(14, 14, per_token=True).key_scale_offset == 16
    assert CacheForm(192, 128, per_token=True).row == 328
    assert CacheForm(576, 512, shared=True, per_token=True).row == 580
    for form in FORMS:
        shape = form.shape(PAGE, KV)
        width = form.value_width if form.shared else None
        assert CacheForm.of_cache(shape, form.key_width, width, per_token=True) == form
        assert "with scales per token" in str(form)
        with pytest.raises(VerifyError):
            CacheForm.of_cache(shape, form.key_width, width).check(
                CacheForm(form.key_width, form.key_width).shape(PAGE, KV)
            )
    with pytest.raises(VerifyError, match="scales per token for keys of 8 numbers and values of 5"):
        CacheForm(8, 5, per_token=True)


def test_scales_that_do_not_fit_are_refused() -> None:
    for options, match in (
        ({"k": math.nan}, "k_scale nan"),
        ({"v": 0.0}, r"v_scale 0\.0"),
        ({"k": -1.0}, r"k_scale -1\.0"),
        ({"k": 2.0, "per_token": True}, "with scales per token"),
    ):
        with pytest.raises(VerifyError, match=match):
            CacheScales(**options)  # type: ignore[arg-type]
    keys = torch.ones(1, KV, 8, dtype=torch.bfloat16)
    with pytest.raises(VerifyError, match=r"per_token.*for a cache of bf16"):
        check_cache_dtype(keys, keys, CacheScales(per_token=True))
    with pytest.raises(VerifyError, match="a cache of f16 for bf16"):
        check_cache_dtype(keys.half(), keys, CacheScales())
    kv = torch.zeros(2, *CacheForm(8, 8).shape(PAGE, KV)[1:], dtype=INT8)
    with pytest.raises(VerifyError, match="with scales per token"):
        OPS["kv_append"].fake(kv, keys, keys, torch.tensor([0]), per_token=True)
