"""Slopes of positions (ALiBi) in every attention kernel, by every mask and form of cache, against the references."""

import itertools
from typing import Any

import pytest
import torch
from op_values import widened
from paged_steps import Heads, PagedStep
from triton_attention import CORES, FACTOR, GROUPED, MASKS, Mix, a_step, agree, appended, attention_dtypes, narrowed
from triton_schedules import run_lowering, some

from ingot.backends.triton.lower.table import LOWERINGS
from ingot.ir.masks import Mask
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS

# Odd numbers of heads, one of them, more than a tile has, and of groups.
HEADS = [GROUPED, Heads(3, 1, 80), Heads(5, 5, 32), Heads(1, 1, 64), Heads(17, 1, 16)]
FEW: Mix = [(1, 200), (3, 100), (1, 0), (0, 4), (1, 33)]
MIXED: Mix = [(33, 20), (1, 300), (1, 0), (0, 7), (2, 5)]


def slopes_of(heads: int) -> torch.Tensor:
    """No two alike, and the last ones so flat that all of a context counts."""
    return torch.linspace(0.6, 0.004, heads)


def over_pages(
    step: PagedStep, most: int, *, sinks: torch.Tensor | None = None, invariant: bool = False, **options: Any
) -> None:
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots, **scales)
    heads = step.q.shape[1]
    args, options = (step.q, kv, *step.lens, sinks, None, None, slopes_of(heads)), {"scale": 0.15, **options}
    agree("paged_attention", step, args, options, most, invariant=invariant)


@attention_dtypes
@pytest.mark.parametrize(("mask", "heads"), some(1, itertools.product(MASKS, HEADS)))
def test_every_mask(mask: str, heads: Heads, dtype: torch.dtype) -> None:
    """In steps of few tokens, of prompts beside decoding, and fused with rotation and the cache write."""
    sinks = torch.linspace(-1.0, 3.0, heads.q).to(dtype) if heads.q % 2 else None
    few = a_step(FEW, dtype, heads, gap=1)
    over_pages(few, 16, sinks=sinks, mask=mask)
    over_pages(a_step(MIXED, dtype, heads, behind=2), 2048, sinks=sinks, mask=mask, soft_cap=1.5)
    if not Mask.named(mask).looks_ahead:
        appended(few, 16, None, None, sinks, None, slopes_of(heads.q), mask=mask)


@attention_dtypes
@pytest.mark.parametrize("mask", some(1, [mask for mask in MASKS if not Mask.named(mask).looks_ahead]))
def test_deterministic_steps(mask: str, dtype: torch.dtype) -> None:
    over_pages(a_step(FEW, dtype, Heads(6, 2, 32)), 16, mask=mask, invariant=True)
    over_pages(a_step(MIXED, dtype, Heads(3, 3, 16)), 256, mask=mask, invariant=True)


@attention_dtypes
def test_a_cache_of_eight_bits(dtype: torch.dtype) -> None:
    scales = {"k_scale": 0.3, "v_scale": 1.7}
    few = narrowed(a_step(FEW, dtype), scales)
    over_pages(few, 16, **scales)
    appended(few, 16, None, None, None, None, slopes_of(GROUPED.q), **scales)
    over_pages(few, 16, invariant=True, **scales)
    over_pages(narrowed(a_step(MIXED, dtype), scales), 2048, **scales)


@attention_dtypes
@pytest.mark.parametrize(
    "heads", some(1, [Heads(4, 2, 48, 32), Heads(3, 1, 17, 40), Heads(36, 1, 24, 12, shared=True)])
)
def test_every_form_of_cache(heads: Heads, dtype: torch.dtype) -> None:
    for mix, most in ((FEW, 16), (MIXED, 2048)):
        over_pages(a_step(mix, dtype, heads), most, **heads.options)


@attention_dtypes
@pytest.mark.parametrize("mask", ["causal", "bidirectional", "window_7"])
def test_sequences_fed_whole(mask: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(60, heads, 24, generator=g).to(dtype) for heads in (6, 2, 2))
    ints = [torch.tensor(one, dtype=torch.int32) for one in ([2, 37, 38], [35, 1, 20])]
    args, options = (q, k, v, *ints, None, slopes_of(6)), {"scale": 0.2, "mask": mask}
    lowering, dims = LOWERINGS["step_attention"], {"T": 60, "B": 3}
    (found,) = run_lowering(OPS["step_attention"], lowering, args, options, tokens=(1, 128), dims=dims, cores=CORES)
    exact = OPS["step_attention"].reference(*widened(args), **options)
    problem = compare(found.cpu(), exact, dtype, factor=FACTOR[dtype])
    assert problem is None, problem


def test_other_slopes_are_another_result() -> None:
    """What holds kernels against references tells the slopes of two neighbours apart."""
    step = a_step([(1, 40), (3, 20)], torch.float32, Heads(3, 3, 16))
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots)
    slopes = slopes_of(3)
    right, wrong = (
        OPS["paged_attention"].reference(step.q, kv, *step.lens, None, None, None, given, scale=0.25)
        for given in (slopes, slopes.roll(1))
    )
    assert compare(wrong, right, torch.float32, factor=100) is not None
