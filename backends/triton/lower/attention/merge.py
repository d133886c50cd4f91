"""Add the launch that merges the splits of attention."""

from collections.abc import Mapping
from typing import Any

import torch

from ingot.backends.triton.kernels.attention.constants import Form, Splits
from ingot.backends.triton.kernels.attention.merge import merge_attention
from ingot.backends.triton.launches import Expr, times
from ingot.backends.triton.lower.sizes import LEAST, power_of_two, tile_width
from ingot.backends.triton.schedule import Schedule, Value

# Numbers of partial results that a program of 128 threads loads at once.
_LOADED = 8192
# The fewest splits that it loads at once: 16 numbers a thread, of 512 columns.
_LEAST_SPLITS = 4


def split_results(schedule: Schedule, rows: Expr, form: Form, splits: Splits) -> dict[str, Value]:
    """Return scratch memory for the results of splits: `partial` and `sizes`. `rows` are tokens or sequences."""
    per_split = (rows, form.kv_heads, splits.most, form.group)
    return {
        "partial": schedule.scratch(torch.float32, (*per_split, form.value_dim)),
        "sizes": schedule.scratch(torch.float32, per_split),
    }


def schedule_merge(schedule: Schedule, rows: Expr, form: Form, splits: Splits, arguments: Mapping[str, Any]) -> None:
    """Add a launch of `merge_attention` to `schedule`. `arguments` are those of the kernel by name."""
    held = power_of_two(splits.most)
    # Most contexts have `base` splits.
    at_once = min(held, max(_LEAST_SPLITS, power_of_two(splits.base)))
    columns = min(tile_width(form.value_dim), max(LEAST, _LOADED // at_once))
    schedule.launch(
        merge_attention,
        (times(rows, form.kv_heads), form.group, -(-form.value_dim // columns)),
        arguments,
        {
            "FORM": form,
            "SPLITS": splits,
            "BLOCK_SPLITS": held,
            "AT_ONCE": at_once,
            "COLUMNS": columns,
            "DEPENDENT": schedule.dependent,
        },
        dependent=schedule.dependent,
    )
