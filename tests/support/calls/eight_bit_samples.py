"""The samples of ops over KV caches, with caches of eight bits: f8e4m3 and i8."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ingot.ir.cache.dtype import as_cached, row_scales
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops import OPS, Sample

# Ops that move the rows of a cache.
_MOVERS = ("move_slots", "state_copy", "state_move", "state_zero")
OVER_CACHES = ("append_attention", "kv_append", "paged_attention", "partial_attention", "qk_norm_rope_append")
OVER_CACHES += ("sparse_attention",)
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
NARROW = (FLOAT8, INT8)
# What an i8 cache holds where nothing was written: a number that is never stored.
UNWRITTEN = -128


def in_eight_bits(kv: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """A cache of this dtype with the numbers of `kv`; in i8, which holds whole numbers, with 32 times them."""
    if narrow is FLOAT8:
        return kv.to(FLOAT8)
    whole = (32 * kv.float()).round().clamp(-127, 127)
    return torch.where(whole.isnan(), UNWRITTEN, whole.nan_to_num(0.0)).to(INT8)


def with_token_scales(kv: torch.Tensor, form: CacheForm, narrow: torch.dtype) -> torch.Tensor:
    """A cache of eight bits with scales per token, and the numbers of `kv`, a cache of this form in wider numbers. Rows
    that were never written are NaN, with the scale NaN."""
    scaled = replace(form, per_token=True)
    bits = torch.zeros(kv.shape[0], *scaled.shape(*kv.shape[2:4])[1:], dtype=torch.uint8)
    made = bits.view(narrow)
    for part, numbers, scales in (
        (form.keys, scaled.keys, scaled.key_scales),
        (form.values, scaled.values, scaled.value_scales),
    ):
        if form.shared and part == form.values:
            continue
        given = part(kv).float()
        own = row_scales(given.flatten(0, 1), narrow)
        scales(made).copy_(own.view(given.shape[:3]))
        codes = as_cached(given.flatten(0, 1), narrow, own).view(given.shape)
        numbers(bits).copy_(codes.view(torch.uint8))
    return made


def form_in(call: dict[str, Any]) -> CacheForm:
    """How the cache of a call stores keys and values, without scales; `call` holds its arguments by name."""
    if "k" in call:
        return CacheForm.of(call["k"], call["v"])
    width, per_token = call["q"].shape[2], call["per_token"]
    form = CacheForm.of_cache(call["kv"].shape, width, call["value_width"], per_token=per_token)
    return replace(form, per_token=False)


def eight_bit_samples(
    name: str, dtype: torch.dtype, seed: int = 0, caches: Sequence[torch.dtype] = NARROW
) -> list[Sample]:
    """Without scales, with them and with scales per token; keys and values that are written go beyond what eight bits
    hold."""
    return [sample for narrow in caches for sample in _samples_over(name, dtype, seed, narrow)]


def _samples_over(name: str, dtype: torch.dtype, seed: int, narrow: torch.dtype) -> list[Sample]:
    op = OPS[name]
    if name in _MOVERS:
        given = op.samples(torch.Generator().manual_seed(seed), dtype)
        return [replace(sample, args=(in_eight_bits(sample.args[0], narrow), *sample.args[1:])) for sample in given]
    if name not in OVER_CACHES:
        return []
    found = []
    for sample in op.samples(torch.Generator().manual_seed(seed), dtype):
        shared = sample.kwargs.get("value_width") is not None or op.bind(sample.args, sample.kwargs).get("v", 0) is None
        for scales in ({}, {"k_scale": 0.3, "v_scale": 0.3 if shared else 1.7}):

            def change(name: str, value: object) -> object:
                if name == "kv":
                    return in_eight_bits(value, narrow)  # type: ignore[arg-type]
                return 300 * value if name == "k" else value  # type: ignore[operator]

            args, kwargs = op.changed(sample.args, dict(sample.kwargs), change)
            found.append(replace(sample, args=args, kwargs={**kwargs, **scales}))
        form = form_in(op.bind(sample.args, sample.kwargs))
        if form.equal or form.shared or form.numbers % 4 == 0:
            made = lambda name, value: with_token_scales(value, form, narrow) if name == "kv" else value  # noqa: E731, B023
            args, kwargs = op.changed(sample.args, dict(sample.kwargs), made)
            found.append(replace(sample, args=args, kwargs={**kwargs, "per_token": True}))
    return found
