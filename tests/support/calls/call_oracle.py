"""Judges what a kernel gave for a call, by the op's reference in float64 and in the dtype of the call.

A kernel may err as much as the reference does in that dtype, as a pass may that is declared ROUNDING, and by the table
of tolerances. Integers are the same, and so is what is not finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from drawn_tokens import wrong_token
from eight_bit_samples import form_in
from one_call import OneCall
from op_values import widened

from ingot.ir.cache.dtype import is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.numerics.contracts import ROUNDING_FACTOR
from ingot.ir.numerics.tolerances import TOLERANCES, compare
from ingot.ir.ops import OPS

# Weights of a softmax go into a product in the dtype of the values: one more rounding than the reference has, of sums
# that reach a few times the size of a result.
_FACTOR = {"append_attention": 4.0, "paged_attention": 4.0, "sparse_attention": 4.0}


def difference(call: OneCall, found: Sequence[torch.Tensor]) -> str | None:
    """How the results of a call (on the host, written states last) are wrong, in words; None when they are not."""
    if call.op == "sample":
        return wrong_token(found[0], *call.args)
    references, exacts = call.reference(), call.reference(exact=True)
    if len(found) != len(references):
        return f"{len(found)} results, expected {len(references)}"
    if call.op == "append_attention" and is_narrow(found[1].dtype):
        for truth, args in ((references, call.args), (exacts, widened(call.args))):
            truth[0] = over_written(args, call.kwargs, found[1])
    for index, (one, reference, exact) in enumerate(zip(found, references, exacts, strict=True)):
        if one.dtype != reference.dtype or one.shape != reference.shape:
            return f"result {index} is {one.dtype}{list(one.shape)}, expected {reference.dtype}{list(reference.shape)}"
        if not one.is_floating_point() and one.dtype is not torch.int8:
            problem = compare(one, reference, one.dtype)
        else:
            form = scaled_form(call.op, call.args, call.kwargs)
            problem = rounded_worse(one, reference, exact, _FACTOR.get(call.op, 1.0), form)
        if problem is not None:
            return f"result {index}: {problem}"
    return None


def over_written(args: Sequence[Any], kwargs: Mapping[str, Any], written: torch.Tensor) -> torch.Tensor:
    """The attention of `append_attention` over the cache that a kernel wrote. A number near a tie between two of eight
    bits may be rounded the other way there, which is judged by itself and moves scores by more than float32 rounds."""
    given = OPS["append_attention"].bind(list(args), dict(kwargs))

    def reference(name: str, values: dict[str, Any]) -> Any:
        op = OPS[name]
        return op.reference(**{key: value for key, value in values.items() if key in op.parameters.names})

    prepared, _ = reference("qk_norm_rope_append", given)
    attention: torch.Tensor = reference("paged_attention", {**given, "q": prepared, "kv": written})
    return attention


def scaled_form(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheForm | None:
    """The form of the cache that a call of the op `name` uses, if its rows have scales of their own."""
    if not kwargs.get("per_token"):
        return None
    return replace(form_in(OPS[name].bind(args, dict(kwargs))), per_token=True)


def rounded_worse(
    found: torch.Tensor,
    reference: torch.Tensor,
    exact: torch.Tensor,
    factor: float = 1.0,
    form: CacheForm | None = None,
) -> str | None:
    """How `found` is further from `exact` than `reference` and `factor` times the table allow, in words. `form` is that
    of a cache of eight bits whose rows have scales of their own."""
    if found.dtype not in TOLERANCES:
        return _eight_bits_worse(found, reference) if form is None else _rows_worse(found, reference, form)
    finite = reference.isfinite()
    if not same_bits(found.masked_fill(finite, 0), reference.masked_fill(finite, 0)):
        return f"it is finite, or not, at other places than the {int((~finite).sum())} of the reference"
    table = TOLERANCES[found.dtype]
    left, right, truth = (tensor.double()[finite] for tensor in (found, reference, exact))
    if not left.numel():
        return None
    error, was = (left - truth).abs(), float((right - truth).abs().max())
    allowed = ROUNDING_FACTOR * was + factor * (table.atol + table.rtol * truth.abs())
    wrong = ~(error <= allowed)
    if not bool(wrong.any()):
        return None
    worst = int((error / allowed).nan_to_num(nan=float("inf")).argmax())
    return (
        f"error {float(error[worst]):.3g} of {float(truth[worst]):.6g}, the reference's is {was:.3g} at most, "
        f"allowed {float(allowed[worst]):.3g}; {int(wrong.sum())} of {wrong.numel()} wrong"
    )


def _rows_worse(found: torch.Tensor, reference: torch.Tensor, form: CacheForm) -> str | None:
    """How rows with scales of their own differ, in words. A scale may be another by rounding; a number by one step, as
    `_eight_bits_worse` says. Rows that have no finite scale hold the same bits."""
    for numbers, scales in ((form.keys, form.key_scales), (form.values, form.value_scales)):
        codes, wanted = numbers(found).float(), numbers(reference).float()
        own, right = scales(found)[..., None], scales(reference)[..., None]
        odd = ~right.isfinite().expand_as(wanted)
        bits = numbers(found.view(torch.uint8)) != numbers(reference.view(torch.uint8))
        if bool((bits & odd).any()) or not torch.equal(own.isfinite(), right.isfinite()):
            return "rows without a finite scale are others"
        if not torch.equal(codes.masked_fill(odd, 0).isnan(), wanted.masked_fill(odd, 0).isnan()):
            return "NaN at other places than in the reference"
        step = right * (1.0 if found.dtype is torch.int8 else wanted.abs() / 8 + 2**-9)
        apart = torch.where(odd, 0.0, (codes * own - wanted * right).abs().nan_to_num(0.0))
        far = int((apart > 1.01 * step.nan_to_num(0.0)).sum())
        wrong = int((apart > 0.5 * step.nan_to_num(0.0)).sum())
        if far or wrong > 1 + wanted.numel() // 50:
            return f"{wrong} of {wanted.numel()} numbers are others, {far} by more than a step"
    return None


def _eight_bits_worse(found: torch.Tensor, reference: torch.Tensor) -> str | None:
    """How they differ, in words. What is rounded to eight bits may have been summed in another order: a few numbers lie
    on the other side of a tie, by one step. In i8 that is 1, in f8e4m3 a part in eight or its least number, 2^-9."""
    whole = found.dtype is torch.int8
    found, reference = found.float(), reference.float()
    if not torch.equal(found.isnan(), reference.isnan()):
        return f"NaN at other places than the {int(reference.isnan().sum())} of the reference"
    found, reference = found.nan_to_num(), reference.nan_to_num()
    wrong = found != reference
    step = torch.ones(()) if whole else reference.abs() / 8 + 2**-9
    far = int(((found - reference).abs() > step).sum())
    if not far and int(wrong.sum()) <= 1 + wrong.numel() // 50:
        return None
    return f"{int(wrong.sum())} of {wrong.numel()} numbers of eight bits are others, {far} by more than a step"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every element; any NaN for any NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
