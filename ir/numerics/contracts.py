"""What a pass promises of the numbers (`ingot.ir.artifact.record.Numerics`), measured under the interpreter.

What a program means is its float64 interpretation. No pass that is EXACT or ROUNDING may change that, whatever it does
to rounding; a LOSSY one may, and owes what `ingot.ir.numerics.quantized_weights` asks.
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

# How many times worse than the program before a ROUNDING pass may be, against float64: the promise of `Numerics`.
ROUNDING_FACTOR = 1.25
# The table's float64 tolerance is for single ops, and logits sum products of sums: 100 times that is 1e-10.
MEANING_FACTOR = 100.0

# The params of each rank in order, by name; of a program without a mesh there is one.
RankParams = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Measured:
    """A tensor as a program computes it in its own dtypes (`found`) and in float64 (`exact`)."""

    found: torch.Tensor
    exact: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """|found - exact|, elementwise; 0 where both are the same infinity or both NaN."""
        return _distance(self.found, self.exact)


@dataclass(frozen=True)
class Measurement:
    """What a program computes of some requests: logits [positions, vocab], and the nodes that were asked for."""

    logits: Measured
    values: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Deviation:
    """What a pass did to a tensor, in the numbers that its contract speaks of. Errors are the largest of all elements.

    `meaning` is how far the float64 value moved. `error` is what the contract bounds: for EXACT how far the computed
    value moved, for ROUNDING its error against float64 (`before` holds that of the program before), for LOSSY the same
    as `meaning`. `relative` is `error` in multiples of the largest float64 value. `allowed` bounds `error` where the
    value is largest; None where nothing does. `lost` elements are not finite before the pass and left out.
    """

    meaning: float
    before: float
    error: float
    relative: float
    allowed: float | None
    lost: int = 0


@dataclass(frozen=True)
class Breach:
    """A broken contract: the largest error, that relative to the largest value, what was allowed, and in words."""

    max_error: float
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
    """What `program` computes of `requests`, in its own dtypes and in float64, each with fresh states.

    `chunk` and `seed` are those of `teacher_forced`. `names` are nodes whose values are kept, as rank 0 has them; they
    must be tensors, and with a cache all of it is fed in one step, so `chunk` stays None.
    """
    if names and chunk is not None:
        raise VerifyError("values of nodes are of one step", expected="chunk=None, all tokens at once")
    logits, kept = [], []
    for exact in (False, True):
        values: dict[str, torch.Tensor] = {}
        watch = _keeper(values, names or ())
        logits.append(logits_of(program, params, requests, exact=exact, chunk=chunk, seed=seed, watch=watch))
        kept.append(values)
    if missing := set(names or ()) - kept[0].keys():
        raise VerifyError(
            f"no tensor by the name {', '.join(sorted(missing))}", where=f"program {program.name}", expected="a node"
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
    """Logits [positions, vocab] of all positions of all requests, one after the other, in float32 or wider: what counts
    are the numbers, and not the dtype that they are returned in. Arguments as for `measure`."""
    run = MeshRun(program, params, exact=exact, watch=watch)
    return wide(torch.cat(teacher_forced(program.input_types(), run, requests, chunk=chunk, seed=seed)))


def _keeper(values: dict[str, torch.Tensor], names: Collection[str]) -> Watch:
    def keep(node: fx.Node, value: Any) -> None:
        if node.name in names and isinstance(value, torch.Tensor):
            values.setdefault(node.name, value)  # ranks come in order

    return keep


def deviation(numerics: Numerics, before: Measured, after: Measured, dtype: torch.dtype) -> Deviation:
    """The numbers beside a contract; `breach` judges. Both tensors have one shape."""
    judged = _judged(before)
    meaning = _most(_distance(after.exact, before.exact)[before.exact.isfinite()])
    was = _most(before.error[judged])
    error, allowed = meaning, None
    if numerics is Numerics.EXACT:
        error, allowed = _most(_distance(after.found, before.found)[judged]), 0.0
    elif numerics is Numerics.ROUNDING:
        table, largest = TOLERANCES[dtype], _largest(before.exact)
        error, allowed = _most(after.error[judged]), ROUNDING_FACTOR * was + table.atol + table.rtol * largest
    return Deviation(meaning, was, error, _relative(error, before.exact), allowed, int((~judged).sum()))


def breach(numerics: Numerics, before: Measured, after: Measured, dtype: torch.dtype) -> Breach | None:
    """How a pass that promised `numerics` broke it on a tensor; None when it kept it. `dtype` is the model's.

    Any tensor that two programs share may be given, logits or another. An element that is NaN or the same infinity in
    both is the same: an overflow that was there before is no pass's fault. Of a LOSSY pass nothing is asked here but
    that what was finite stays so.
    """
    if numerics is Numerics.LOSSY:
        lost = before.found.isfinite() & ~after.found.isfinite()
        text = f"{int(lost.sum())} of {lost.numel()} elements are no longer finite"
        return Breach(float("inf"), float("inf"), 0.0, text) if bool(lost.any()) else None
    if problem := changed_meaning(before, after):
        return problem
    if numerics is Numerics.EXACT:
        return _changed_bits(before.found, after.found)
    # An integer that follows from floats, as a sampled token does, may tip over where they round otherwise.
    if not before.found.is_floating_point():
        return None
    return _rounded_worse(before, after, TOLERANCES[dtype])


def changed_meaning(before: Measured, after: Measured) -> Breach | None:
    """How the float64 value changed; None when it did not, beyond what the order of adding does."""
    left, right = before.exact, after.exact
    if left.shape != right.shape:
        text = f"the shape is {list(right.shape)}, before {list(left.shape)}"
        return Breach(float("inf"), float("inf"), 0.0, text)
    both = left.isnan() & right.isnan()  # a page that nothing was written to
    left, right = left.masked_fill(both, 0), right.masked_fill(both, 0)
    problem = compare(right, left, left.dtype, factor=MEANING_FACTOR)
    if problem is None:
        return None
    table = TOLERANCES.get(left.dtype, Tolerance(0.0, 0.0))
    allowed = MEANING_FACTOR * (table.atol + table.rtol * left.double().abs())
    return _worst(_distance(right, left), allowed, left, f"the meaning changed: {problem}")


def _changed_bits(before: torch.Tensor, after: torch.Tensor) -> Breach | None:
    same = (before == after) | (before.isnan() & after.isnan())
    if before.dtype == after.dtype and bool(same.all()):
        return None
    error = _distance(after, before)
    of = f"in {after.dtype}, before {before.dtype}" if before.dtype != after.dtype else f"by up to {_most(error):.3g}"
    text = f"declared exact, but values differ {of}"
    return _worst(error, torch.zeros(()), before, text)


def _rounded_worse(before: Measured, after: Measured, tolerance: Tolerance) -> Breach | None:
    judged = _judged(before)
    was, now = before.error.masked_fill(~judged, 0.0), after.error.masked_fill(~judged, 0.0)
    allowed = ROUNDING_FACTOR * was.max() + tolerance.atol + tolerance.rtol * before.exact.abs().nan_to_num()
    if bool((now <= allowed).all()):  # NaN is not
        return None
    text = f"the error is {_most(now):.3g}, before {_most(was):.3g}"
    return _worst(now, allowed, before.exact, text)


def _judged(before: Measured) -> torch.Tensor:
    """Where the model itself overflows there is no rounding to speak of; and no such place excuses the others."""
    return before.found.isfinite() & before.exact.isfinite()


def _worst(error: torch.Tensor, allowed: torch.Tensor, reference: torch.Tensor, text: str) -> Breach:
    """The breach at the element that exceeds most what is allowed there."""
    allowed = allowed.expand_as(error)
    index = int((error - allowed).nan_to_num(nan=float("inf")).argmax())
    most = _most(error)
    return Breach(most, _relative(most, reference), float(allowed.flatten()[index]), text)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    left, right = found.double(), expected.double()
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, (left - right).abs())


def _most(error: torch.Tensor) -> float:
    """The largest; infinity where one is NaN."""
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def _largest(reference: torch.Tensor) -> float:
    finite = reference.double().abs().nan_to_num(posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _relative(error: float, reference: torch.Tensor) -> float:
    largest = _largest(reference)
    return 0.0 if error == 0.0 else error / largest if largest else float("inf")
