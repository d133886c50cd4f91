"""Steps of attention by its Triton kernels, held against the references."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from call_oracle import over_written, rounded_worse, scaled_form
from eight_bit_samples import FLOAT8, in_eight_bits, with_token_scales
from op_values import widened
from paged_steps import Heads, PagedStep, paged_step
from triton_schedules import DEVICE, TESTED, run_lowering

from ingot.backends.triton.lower.attention.paged import LOWERINGS
from ingot.ir.cache.dtype import SCALE_DEFAULTS, is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table

POSITIONS = 4096
CORES = 132 if DEVICE == "cuda" else 3  # few programs: the interpreter runs them one by one
# Weights of a softmax go into a product in the dtype of the values: one more rounding than the reference has, of sums
# that reach a few times the size of a result.
FACTOR = {torch.float32: 1.0, torch.bfloat16: 4.0, torch.float16: 4.0}
GROUPED = Heads(4, 2, 64)
# (tokens fed, positions cached before) of each sequence.
Mix = list[tuple[int, int]]
# Of every kind of mask, but for trees, which take ancestors.
MASKS = ("causal", "window_30", "chunked_20", "bidirectional", "block_causal_8")
attention_dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)


def rotations(rotary: int) -> torch.Tensor:
    """The table of a rotary embedding."""
    return make_table(
        {"kind": "rope", "rope_type": "default", "positions": POSITIONS, "theta": 1e4, "rotary_dim": rotary}
    )


def a_step(mix: Mix, dtype: torch.dtype, heads: Heads = GROUPED, **layout: int) -> PagedStep:
    return paged_step(torch.Generator().manual_seed(len(mix)), dtype, heads, mix, **layout)


def narrowed(step: PagedStep, scales: dict[str, Any], narrow: torch.dtype = FLOAT8) -> PagedStep:
    """The step over a cache of eight bits, NaN or -128 where nothing was written. The keys and values of the first
    token are large: beyond what eight bits hold, if a scale is given. Scales per token hold any number, and scores of
    larger keys would show the rounding of float32."""
    large = 20 if scales.get("per_token") else 2000
    k, v = step.k.clone(), None if step.v is None else step.v.clone()
    k[0] *= large * scales.get("k_scale", 1.0)
    if v is not None:
        v[0] *= large * scales.get("v_scale", 1.0)
    if scales.get("per_token"):
        kv = with_token_scales(step.kv, CacheForm.of(k, v), narrow)
    else:
        kv = in_eight_bits(step.kv, narrow)
    return replace(step, kv=kv, k=k, v=v)


def agree(
    name: str, step: PagedStep, args: tuple[Any, ...], options: dict[str, Any], most: int, cores: int = CORES,
    *, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The lowering for steps of up to `most` tokens, which may err as the reference does in the dtype, and by the table
    of tolerances: a softmax feels how keys are rounded. The cache is untouched where nothing is written, NaN included.
    Gives the attention."""
    op, dtype = OPS[name], step.q.dtype
    tokens = (1, most)
    dims = {"T": len(step.q), "B": len(step.q_starts)}
    lowering = LOWERINGS[name]
    found = run_lowering(op, lowering, args, options, tokens=tokens, dims=dims, cores=cores, invariant=invariant)
    reference, exact = (op.reference(*given, **options) for given in (args, widened(args)))
    if isinstance(reference, torch.Tensor):
        reference, exact = (reference,), (exact,)
    if name == "append_attention" and is_narrow(step.kv.dtype):
        written = found[1].cpu()
        reference, exact = (
            (over_written(given, options, written), truth[1])
            for given, truth in ((args, reference), (widened(args), exact))
        )
    check(found, reference, exact, FACTOR[dtype], scaled_form(name, args, options))
    return found[0].cpu()


def check(
    found: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    factor: float,
    form: CacheForm | None = None,
) -> None:
    """The attention, which may err by `factor` times the table, and what comes with it. `form` is that of a cache whose
    rows have scales of their own. The tolerance is for numbers of the size of one: rows of larger ones, which caches of
    eight bits have, are held to it by their largest."""
    judged = [(one.cpu(), *truth) for one, *truth in zip(found, reference, exact, strict=True)]
    size = exact[0].abs().amax((1, 2), keepdim=True)
    size = size.nan_to_num(1.0).clamp(min=4).log2().ceil().exp2() / 4
    judged[0] = tuple((one / size).to(one.dtype) for one in judged[0])
    for given, allowed in zip(judged, (factor, 1.0), strict=False):
        problem = rounded_worse(*given, allowed, form)
        assert problem is None, problem


def appended(
    step: PagedStep, most: int, *weights: torch.Tensor | None, rotary: int = 0, cores: int = CORES, **options: Any
) -> None:
    """`append_attention` of the step."""
    dim = step.q.shape[2]
    args = (step.kv, step.q, step.k, step.v, step.positions, rotations(rotary or dim), step.slots, *step.lens, *weights)
    agree("append_attention", step, args, {"eps": 1e-5, "scale": dim**-0.5, **options}, most, cores)


def over_pages(
    step: PagedStep, most: int, sinks: torch.Tensor | None = None, *, invariant: bool = False, **options: Any
) -> None:
    """`paged_attention` of the step, over a cache that holds what it feeds."""
    scales = {name: options[name] for name in SCALE_DEFAULTS if name in options}
    kv = OPS["kv_append"].reference(step.kv, step.k, step.v, step.slots, **scales)
    args, options = (step.q, kv, *step.lens, sinks), {"scale": step.q.shape[2] ** -0.5, **options}
    agree("paged_attention", step, args, options, most, invariant=invariant)
