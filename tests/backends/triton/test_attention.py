"""Attention kernels against their references: any mix of sequences, every option, every size of head."""

from typing import Any

import pytest
import torch
from paged_steps import Heads, PagedStep, paged_step
from triton_schedules import TESTED, run_lowering

from ingot.backends.triton.lower.attention import LOWERINGS
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table
from ingot.ir.tolerances import compare

POSITIONS = 4096
CORES = 8  # few programs: the interpreter runs them one by one
# Weights of a softmax go into a product in the dtype of the values: one more rounding than the reference has, of sums
# that reach a few times the size of a result.
FACTOR = {torch.float32: 1.0, torch.bfloat16: 4.0, torch.float16: 4.0}


def table(rotary: int) -> torch.Tensor:
    return make_table(
        {"kind": "rope", "rope_type": "default", "positions": POSITIONS, "theta": 1e4, "rotary_dim": rotary}
    )


def agree(name: str, args: tuple[Any, ...], options: dict[str, Any], step: PagedStep, most: int) -> None:
    """The lowering against the reference; what the cache holds elsewhere is untouched, NaN included."""
    op, dtype = OPS[name], step.q.dtype
    found = [
        one.cpu()
        for one in run_lowering(op, LOWERINGS[name], args, options, tokens=(1, most), dims=step.dims, cores=CORES)
    ]
    wide = [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
    # Not what the table holds in float32: cosines are as exact as that in any dtype.
    expected = op.reference(*wide, **options)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert compare(found[0], expected[0], dtype, factor=FACTOR[dtype]) is None, compare(found[0], expected[0], dtype)
    if len(found) > 1:
        held = expected[1].isnan()
        assert torch.equal(found[1].isnan(), held)
        # The norm and the turn are rounded apart, as the op's meaning has it, and the oracle in float64 rounds nothing.
        problem = compare(found[1].nan_to_num(), expected[1].nan_to_num(), dtype, factor=8 * FACTOR[dtype])
        assert problem is None, problem


def appended(
    step: PagedStep, rotary: int, weights: tuple[torch.Tensor | None, ...] = (), **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = (step.kv, step.q, step.k, step.v, step.positions, table(rotary), step.slots, *step.lens, *weights)
    return args, {"eps": 1e-5, "scale": step.q.shape[-1] ** -0.5, **options}


SIZES = [
    Heads(4, 2, 64),
    Heads(3, 1, 80),
    Heads(6, 2, 96),
    Heads(5, 5, 128),
    Heads(2, 1, 256),
    Heads(24, 1, 64),
]
# (fed, cached before) of each sequence.
MIXES = {
    "one": [(1, 300)],
    "first": [(1, 0)],
    "several": [(1, 5), (1, 700), (1, 16), (1, 0), (1, 33)],
    "chunks": [(3, 40), (1, 130), (9, 0), (0, 12)],
    "a prompt": [(23, 0)],
}


@pytest.mark.parametrize("dtype", TESTED, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("padding", [(0, 0), (2, 3)], ids=["full", "padded"])
def test_any_mix_of_sequences(mix: str, padding: tuple[int, int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    step = paged_step(g, dtype, SIZES[0], MIXES[mix], gap=padding[0], behind=padding[1])
    args, options = appended(step, 64)
    agree("append_attention", args, options, step, 64 if len(step.q) > 1 else 1)
