"""Check the numerics contract of a pass: how much it may change results (`ingot.ir.artifact.record.Numerics`).

The interpreter runs the program before and after the pass. The meaning of a program is its float64 results. An EXACT or
ROUNDING pass may not change it, whatever it does to rounding. A LOSSY pass may, but must pass the checks of
`ingot.ir.numerics.quantized_weights`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import VerifyError
from ingot.ir.interpret import Watch
from ingot.ir.numerics.harness import MeshRun, teacher_forced
from ingot.ir.numerics.tolerances import TOLERANCES, Tolerance, compare
from ingot.ir.ops.registry import wide
from ingot.ir.program import Program

# The largest growth of the error against float64 in a ROUNDING pass, as `Numerics` promises. The error of a tensor is
# the root mean square over its elements. Its largest element is an extreme value: if a pass only draws all roundings
# again, as on a mesh, it grows by up to 2 by chance. The root mean square then grows by up to 1.23. (Both are from 200
# sets of prompts with 76 tokens, on two ranks in bfloat16.)
ROUNDING_FACTOR = 1.25
# The largest growth of the largest element's error. The next narrower dtype loses at least 3 bits, a factor of 8. The
# limit is halfway, in bits, between it and growth by chance.
OUTLIER_FACTOR = 4.0
# The table's float64 tolerance is for single ops. Logits accumulate many of them: 100 times rtol is 1e-10.
MEANING_FACTOR = 100.0

# The params of each rank in order, by name. A program without a mesh has one rank.
RankParams = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Measured:
    """A tensor of a program, computed twice: in the program's dtypes (`found`) and in float64 (`exact`)."""

    found: torch.Tensor
    exact: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """Return |found - exact| of each element. It is 0 where both are NaN or both are the same infinity."""
        return _distance(self.found, self.exact)


@dataclass(frozen=True)
class Measurement:
    """The results of running requests through a program, in its dtypes and in float64.

    `logits` is [positions, vocab], for the positions of all requests. `values` holds the tensors of chosen nodes, by
    node name.
    """

    logits: Measured
    values: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Deviation:
    """How much a pass changed a tensor. Errors are the largest over all elements, unless said otherwise.

    meaning   the change of the float64 value
    before    the error against float64 before the pass, as root mean square
    error     the error that the pass's contract limits. EXACT: the change of the computed value. ROUNDING: the error
              against float64 after the pass, as root mean square. LOSSY: `meaning`
    relative  `error` divided by the largest float64 value
    allowed   the limit of `error`; None without a limit
    lost      the number of elements that were not finite before the pass; the errors leave them out
    """

    meaning: float
    before: float
    error: float
    relative: float
    allowed: float | None
    lost: int = 0


@dataclass(frozen=True)
class Breach:
    """A tensor whose errors exceed their limit.

    error           the error that exceeds its limit: of an element, or the root mean square of all
    relative_error  `error` divided by the tensor's largest value
    allowed         the limit of `error`; if elements have limits of their own, the one that is exceeded most
    text            a description for messages
    """

    error: float
    relative_error: float
    allowed: float
    text: str

    def __str__(self) -> str:
        return self.text


def measure(
    program: Program,
    params: RankParams,
    requests: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    seed: int | None = None,
    names: Collection[str] | None = None,
) -> Measurement:
    """Run `requests` (token ids) through `program` twice, in its dtypes and in float64, with fresh states each time.

    `params` holds the params of each rank by name. A step runs at most `chunk` tokens of each request; None: all
    tokens. `seed` permutes the pages of the KV cache. `names` are nodes whose tensors the result holds too, from rank
    0. `chunk` must then be None. Raises VerifyError for an unknown node.
    """
    if names and chunk is not None:
        raise VerifyError("values of nodes need all tokens in one step", expected="chunk=None, all tokens at once")
    logits, kept = [], []
    for exact in (False, True):
        values: dict[str, torch.Tensor] = {}
        watch = _keeper(values, names or ())
        logits.append(logits_of(program, params, requests, exact=exact, chunk=chunk, seed=seed, watch=watch))
        kept.append(values)
    if missing := set(names or ()) - kept[0].keys():
        raise VerifyError(
            f"no tensor has the name {', '.join(sorted(missing))}", where=f"program {program.name}", expected="a node"
        )
    found, exactly = kept
    return Measurement(Measured(*logits), {name: Measured(found[name], exactly[name]) for name in found})


def logits_of(
    program: Program,
    params: RankParams,
    requests: Sequence[Sequence[int]],
    *,
    exact: bool,
    chunk: int | None = None,
    seed: int | None = None,
    watch: Watch | None = None,
) -> torch.Tensor:
    """Run `requests` (token ids) through a program, and return the logits [positions, vocab] of all positions.

    The logits are in float32 or wider. `params` holds the params of each rank by name. `exact` computes in float64. A
    step runs at most `chunk` tokens of each request; None: all tokens. `seed` permutes the pages of the KV cache.
    `watch` is called with each node and its result.
    """
    run = MeshRun(program, params, exact=exact, watch=watch)
    return wide(torch.cat(teacher_forced(program.input_types(), run, requests, chunk=chunk, seed=seed)))


def _keeper(values: dict[str, torch.Tensor], names: Collection[str]) -> Watch:
    def keep(node: fx.Node, value: Any) -> None:
        if node.name in names and isinstance(value, torch.Tensor):
            values.setdefault(node.name, value)  # ranks come in order

    return keep


def deviation(numerics: Numerics, before: Measured, after: Measured, dtype: torch.dtype) -> Deviation:
    """Return how much a pass changed a tensor, in a model of `dtype`.

    `numerics` is the contract of the pass: exact, rounding or lossy. `before` and `after` are the tensor before and
    after the pass, with equal shapes. The function `breach` says whether the change is allowed.
    """
    judged = _judged(before)
    meaning = _most(_distance(after.exact, before.exact)[before.exact.isfinite()])
    was = _mean(before.error[judged])
    error, allowed = meaning, None
    if numerics is Numerics.EXACT:
        error, allowed = _most(_distance(after.found, before.found)[judged]), 0.0
    elif numerics is Numerics.ROUNDING:
        error = _mean(after.error[judged])
        allowed = ROUNDING_FACTOR * was + _mean(_near(before.exact[judged], TOLERANCES[dtype]))
    return Deviation(meaning, was, error, _relative(error, before.exact), allowed, int((~judged).sum()))


def breach(numerics: Numerics, before: Measured, after: Measured, dtype: torch.dtype) -> Breach | None:
    """Return how a pass changed a tensor more than its contract allows; None if it did not.

    `numerics` is the contract of the pass: exact, rounding or lossy. `before` and `after` are the tensor before and
    after the pass. `dtype` is the dtype of the model. Elements count as equal if both are NaN or both are the same
    infinity. A LOSSY pass must only keep finite elements finite.
    """
    if numerics is Numerics.LOSSY:
        lost = before.found.isfinite() & ~after.found.isfinite()
        text = f"{int(lost.sum())} of {lost.numel()} elements are no longer finite"
        return Breach(float("inf"), float("inf"), 0.0, text) if bool(lost.any()) else None
    if problem := changed_meaning(before, after):
        return problem
    if numerics is Numerics.EXACT:
        return _changed_bits(before.found, after.found)
    # An integer computed from floats, such as a sampled token, may change with their rounding.
    if not before.found.is_floating_point():
        return None
    return _rounded_worse(before, after, TOLERANCES[dtype])


def changed_meaning(before: Measured, after: Measured) -> Breach | None:
    """Return how a pass changed the float64 value of a tensor; None if it did not.

    Tiny changes do not count, such as from adding numbers in another order.
    """
    left, right = before.exact, after.exact
    if left.shape != right.shape:
        text = f"the shape is {list(right.shape)}, before {list(left.shape)}"
        return Breach(float("inf"), float("inf"), 0.0, text)
    both = left.isnan() & right.isnan()  # for example, an unwritten page
    left, right = left.masked_fill(both, 0), right.masked_fill(both, 0)
    problem = compare(right, left, left.dtype, factor=MEANING_FACTOR)
    if problem is None:
        return None
    table = TOLERANCES.get(left.dtype, Tolerance(0.0, 0.0))
    allowed = MEANING_FACTOR * (table.atol + table.rtol * left.double().abs())
    return _worst(_distance(right, left), allowed, left, f"the meaning changed: {problem}")


def _changed_bits(before: torch.Tensor, after: torch.Tensor) -> Breach | None:
    """Return how computed values changed; None if their bits are equal. 0 and -0 count as equal."""
    same = (before == after) | (before.isnan() & after.isnan())
    if before.dtype == after.dtype and bool(same.all()):
        return None
    error = _distance(after, before)
    of = f"in {after.dtype}, before {before.dtype}" if before.dtype != after.dtype else f"by up to {_most(error):.3g}"
    text = f"declared exact, but values differ {of}"
    return _worst(error, torch.zeros(()), before, text)


def _rounded_worse(before: Measured, after: Measured, tolerance: Tolerance) -> Breach | None:
    """Return how the error against float64 grew more than a ROUNDING pass may let it; None if it did not.

    The root mean square may grow by ROUNDING_FACTOR, and the largest error by OUTLIER_FACTOR. The tolerance of each
    element is added.
    """
    judged = _judged(before)
    was, now, exact = before.error[judged], after.error[judged], before.exact[judged]
    near = _near(exact, tolerance)
    mean, allowed_mean = _mean(now), ROUNDING_FACTOR * _mean(was) + _mean(near)
    if not mean <= allowed_mean:
        text = f"the error is {mean:.3g}, before {_mean(was):.3g}"
        return Breach(mean, _relative(mean, exact), allowed_mean, text)
    allowed = OUTLIER_FACTOR * _most(was) + near
    if bool((now <= allowed).all()):
        return None
    return _worst(now, allowed, exact, f"the largest error is {_most(now):.3g}, before {_most(was):.3g}")


def _near(exact: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return the tolerance of each element of `exact`."""
    return tolerance.atol + tolerance.rtol * exact.double().abs()


def _judged(before: Measured) -> torch.Tensor:
    """Return a mask of the elements to compare.

    These are finite before the pass, both in the program's dtypes and in float64.
    """
    return before.found.isfinite() & before.exact.isfinite()


def _worst(error: torch.Tensor, allowed: torch.Tensor, reference: torch.Tensor, text: str) -> Breach:
    """Return a `Breach` for errors that exceed their limits.

    `error` and `allowed` hold the error and the limit of each element. The result has the largest error, and the limit
    of the element that exceeds its limit most. `reference` holds the values that relative errors are divided by.
    """
    allowed = allowed.expand_as(error)
    index = int((error - allowed).nan_to_num(nan=float("inf")).argmax())
    most = _most(error)
    return Breach(most, _relative(most, reference), float(allowed.flatten()[index]), text)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    left, right = found.double(), expected.double()
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, (left - right).abs())


def _most(error: torch.Tensor) -> float:
    """Return the largest element of `error`. It is infinity if any is NaN, and 0 if there are no elements."""
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def _mean(error: torch.Tensor) -> float:
    """Return the root mean square of `error`. It is infinity if any is NaN, and 0 if there are no elements."""
    return float(error.nan_to_num(nan=float("inf")).square().mean().sqrt()) if error.numel() else 0.0


def _largest(reference: torch.Tensor) -> float:
    finite = reference.double().abs().nan_to_num(posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _relative(error: float, reference: torch.Tensor) -> float:
    largest = _largest(reference)
    return 0.0 if error == 0.0 else error / largest if largest else float("inf")
