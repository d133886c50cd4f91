"""Fused q/k norm, rotary embedding and attention with the gains of a trained norm, which differ widely within a head.

Qwen3-0.6B's K norm has gains up to 96.5. Kernels may err as the ops apart do in the dtype, by the contract for
rounding, and by the table of tolerances.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_oracle import rounded_worse
from paged_steps import Heads, PagedStep, paged_step
from triton_schedules import DEVICE, run_lowering

from ingot.backends.triton.lower.table import LOWERINGS
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table

LARGEST = 96.5
# Elements of this and less are judged apart: beside large ones their errors would be lost.
QUIET = 1.0
MIX = [(1, 20), (3, 7), (1, 0)]
CORES = 132 if DEVICE == "cuda" else 3  # few programs: the interpreter runs them one by one
# The weights of a softmax are rounded once more than in the reference, for a product of sums a few times as large.
SOFTMAX = {torch.float32: 1.0, torch.bfloat16: 4.0, torch.float16: 4.0}

in_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
heads_of = pytest.mark.parametrize("heads", [Heads(2, 1, 128), Heads(6, 2, 64)], ids=["128", "64"])
wide_gain = pytest.mark.parametrize("wide", [False, True], ids=["same dtype", "float32 gains"])


def drawn_gains(g: torch.Generator, dim: int, largest: float, interleaved: bool) -> torch.Tensor:
    """A gain for each element, from 0.1 up to `largest`. Half of the pairs that are turned together are quiet, and one
    element has the largest gain."""
    pairs = torch.rand(2, dim // 2, generator=g)
    quiet = torch.arange(dim // 2) % 2 == 0
    low, high = torch.where(quiet, 0.1, QUIET), torch.where(quiet, QUIET, largest)
    pairs = low * (high / low) ** pairs
    pairs[1, 3] = largest
    return pairs.T.reshape(dim) if interleaved else pairs.reshape(dim)


def quiet_elements(gain: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The elements of a head both of whose gains are quiet: its own, and that of its partner."""
    half = gain.shape[0] // 2
    partner = gain.view(half, 2).flip(1).reshape(-1) if interleaved else gain.roll(half)
    return (gain <= QUIET) & (partner <= QUIET)


def drawn(dtype: torch.dtype, heads: Heads, wide: bool, interleaved: bool) -> tuple[PagedStep, list[torch.Tensor]]:
    """A step, and the gains of q and of k."""
    g = torch.Generator().manual_seed(heads.dim + interleaved)
    kind = torch.float32 if wide else dtype
    gains = [drawn_gains(g, heads.dim, largest, interleaved).to(kind) for largest in (2.0, LARGEST)]
    assert float(gains[1].max()) == LARGEST
    return paged_step(g, dtype, heads, MIX, gap=1), gains


def results(name: str, step: PagedStep, args: tuple[Any, ...], options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """What the kernel gives, what the reference gives, and that in float64; of each the result and the cache."""
    op = OPS[name]
    dims = {"T": len(step.q), "B": len(step.q_starts)}
    found = run_lowering(op, LOWERINGS[name], args, options, tokens=(1, 16), dims=dims, cores=CORES)
    wide = [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
    return [[one.cpu() for one in found], *(list(op.reference(*given, **options)) for given in (args, wide))]


def check_append(dtype: torch.dtype, heads: Heads, wide: bool, interleaved: bool) -> None:
    step, gains = drawn(dtype, heads, wide, interleaved)
    # Keys that were never written hold NaN, and those of the steps before are unchanged: compare this step's only.
    args = (step.kv, step.q, step.k, step.v, step.positions, table(heads.dim), step.slots, *gains)
    made = results("qk_norm_rope_append", step, args, {"eps": 1e-6, "interleaved": interleaved})
    written = step.slots[step.slots >= 0]
    keys = [kv[written // kv.shape[2], 0, written % kv.shape[2]] for _, kv in made]
    queries = [q for q, _ in made]
    for gain, rows in ((gains[0], queries), (gains[1], keys)):
        quiet = quiet_elements(gain, interleaved)
        assert 0.3 < float(quiet.float().mean()) < 0.7
        for part in (quiet, ~quiet):
            problem = rounded_worse(*(one[..., part] for one in rows))
            assert problem is None, problem
    assert (problem := rounded_worse(*(kv for _, kv in made))) is None, problem


def check_attention(dtype: torch.dtype, heads: Heads, wide: bool, interleaved: bool) -> None:
    step, gains = drawn(dtype, heads, wide, interleaved)
    # A cache that earlier steps filled with keys of such gains.
    kv = step.kv.clone()
    kv[:, 0] = (kv[:, 0].float() * gains[1].float()).to(dtype)
    args = (kv, step.q, step.k, step.v, step.positions, table(heads.dim), step.slots, *step.lens, *gains)
    options = {"eps": 1e-6, "interleaved": interleaved, "scale": heads.dim**-0.5}
    for factor, *each in zip((SOFTMAX[dtype], 1.0), *results("append_attention", step, args, options), strict=True):
        assert (problem := rounded_worse(*each, factor)) is None, problem


def table(rotary: int) -> torch.Tensor:
    return make_table({"kind": "rope", "rope_type": "default", "positions": 64, "theta": 1e6, "rotary_dim": rotary})


# Triton's interpreter rounds to float16 as a GPU does, and to bfloat16 towards zero.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@heads_of
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_anywhere(heads: Heads, interleaved: bool, dtype: torch.dtype) -> None:
    check_append(dtype, heads, wide=False, interleaved=interleaved)


@pytest.mark.one_in(2)
@heads_of
@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_anywhere(heads: Heads, interleaved: bool) -> None:
    check_attention(torch.float32, heads, wide=False, interleaved=interleaved)


@pytest.mark.gpu
@in_half
@heads_of
@wide_gain
@pytest.mark.parametrize("interleaved", [False, True])
def test_append(dtype: torch.dtype, heads: Heads, wide: bool, interleaved: bool) -> None:
    check_append(dtype, heads, wide, interleaved)


@pytest.mark.gpu
@in_half
@heads_of
@wide_gain
@pytest.mark.parametrize("interleaved", [False, True])
def test_attention(dtype: torch.dtype, heads: Heads, wide: bool, interleaved: bool) -> None:
    check_attention(dtype, heads, wide, interleaved)
