"""Add the launches of decode attention over latents with the kernel for Hopper, `decode_latents`."""

import torch

from ingot.backends.triton.kernels.attention.constants import Splits
from ingot.backends.triton.kernels.attention.decode_latents import decode_latents
from ingot.backends.triton.kernels.attention.find_splits import RECORD, find_splits
from ingot.backends.triton.launches import Expr, least
from ingot.backends.triton.lower.attention.merge import schedule_merge, split_results
from ingot.backends.triton.lower.attention.shapes import Attention
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.types import DTYPES

HEADS = 64  # rows of the kernel's tiles
# The kernel reads two tiles of 64 positions at once. One program fills a multiprocessor's shared memory. It has no
# stages. `warps` are those of its first warpgroup, and of a loop over sequences of mixed steps (`_scan` in decode.py).
LATENTS_ON_HOPPER = DecodeTiles(keys=128, stages=2, programs=1, warps=4, early=0)
_LATENTS, _ROTATED = 512, 64  # numbers of a key: those of DeepSeek V2 and V3
_COPY = 16  # bytes that a thread copies at once


def takes_latents(attention: Attention, dtype: str, cache_dtype: str, sm: int) -> bool:
    """Return whether `decode_latents` computes a decode attention whose k and v are in the cache.

    `attention` is not yet divided by heads. `sm` is the compute capability: wgmma is an instruction of 9.0 only. With
    more than 64 q heads, a tile holds a divisor of their number, and more than half of its rows must be used.
    """
    form, layout, itemsize = attention.form, attention.cache.layout, DTYPES[dtype].itemsize
    widths = (form.block, form.tail, form.dim, form.value_dim) == (_LATENTS, _ROTATED, _LATENTS + _ROTATED, _LATENTS)
    copied = all(step * itemsize % _COPY == 0 for step in (layout.page_stride, layout.slot_stride))
    # A hidden key has the lowest score before scores are scaled.
    plain = attention.scores.soft_cap is None and attention.scores.scale > 0
    plain &= layout.v_scale == 1.0 and not layout.per_token
    extra = any(attention.arguments[name] is not None for name in ("sinks", "slopes"))
    filled = form.group <= HEADS or 2 * attention.divided(HEADS).form.group > HEADS
    one = form.same and attention.cache.kv_heads == 1
    bits = dtype == cache_dtype and itemsize == 2
    return sm == 90 and one and widths and copied and plain and not extra and filled and bits


def schedule_latents(
    attention: Attention,
    schedule: Schedule,
    results: tuple[Value, Value | None],
    rows: Expr,
    items: Expr,
    splits: Splits,
) -> None:
    """Add three launches to `schedule`: find the splits of all contexts, compute them, and merge their results.

    `results` are the buffers (attention, log-sum-exp or None). `rows` are the contexts: tokens, or with `splits.single`
    sequences. `items` is how many splits there can be.
    """
    out, lse = results
    records = schedule.scratch(torch.int32, (items, RECORD.value))
    used = schedule.scratch(torch.int32, (rows, attention.form.kv_heads))
    merged = {"out": out, "lse": lse, **split_results(schedule, rows, attention.form, splits)}
    constants = {"FORM": attention.form, "SCORES": attention.scores, "SPLITS": splits, "DEPENDENT": schedule.dependent}

    def given(*names: str) -> dict[str, Value | Expr | None]:
        return {name: attention.arguments[name] for name in names}

    schedule.launch(
        find_splits,
        (items, 1, 1),
        {
            "records": records,
            "used": used,
            "out": out,
            "lse": lse,
            **given("q_starts", "q_lens", "kv_lens", "tokens", "sequences"),
        },
        constants,
        warps=1,
        dependent=schedule.dependent,
    )
    schedule.launch(
        decode_latents,
        (least(items, schedule.cores), 1, 1),
        {**merged, "records": records, "items": items, **given("kv", "q", "page_table", "width")},
        {**constants, "FED": attention.fed, "CACHE": attention.cache.layout},
        warps=LATENTS_ON_HOPPER.warps,  # the kernel adds two warpgroups
        dependent=schedule.dependent,
    )
    schedule_merge(schedule, rows, attention.form, splits, {**merged, "used": used, **given("q_starts")})
