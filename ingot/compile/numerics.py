"""Measure every pass against its numerics contract during a compile, on sample inputs with the real weights."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ingot.compile.weight_statistics import WeightStatistic, weight_statistics
from ingot.frontend.trace import Limits
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import NumericsError, VerifyError
from ingot.ir.features import find_input
from ingot.ir.granule import granule_of
from ingot.ir.mesh import ranks
from ingot.ir.numerics.contracts import Breach, Measured, breach, changed_meaning, deviation, logits_of, measure
from ingot.ir.numerics.divergence import Differs, Divergence, Overflow, by_contract, first_divergence, first_nonfinite
from ingot.ir.numerics.harness import rank_params, step_inputs
from ingot.ir.numerics.quantized_weights import kl_divergence, weight_breaches, with_originals, with_rounded_weights
from ingot.ir.numerics.recording import Inputs, record
from ingot.ir.program import Model, Program
from ingot.ir.recipe import Recipe, Results
from ingot.ir.text import print_program
from ingot.passes.pipeline import OPTIONAL

Read = Callable[[str], torch.Tensor]
_Params = list[dict[str, torch.Tensor]]

# Tokens of the sample requests: past two pages of 16, past one, and one token. A small max_batch takes the first ones.
_LENGTHS = (33, 17, 1)
_CHUNK = 11  # tokens of a sequence in a step: cuts pages and prompts at odd places, and reads the earlier steps' cache
_SEED = 3  # seeds the order of page allocation
# Maximum programs with stored logits. Needed are those before and after a pass, and the one that all bucket classes
# start from.
_KEPT = 4


@dataclass(frozen=True)
class PassNumerics:
    """The effect of one pass on the logits of sample inputs. Numbers are absolute errors unless said otherwise.

    - `numerics`: the pass's numerics contract: EXACT, ROUNDING or LOSSY
    - `changed`: False if the pass left the program unchanged; then nothing was computed
    - `meaning`: change of the logits when both programs are computed in float64
    - `before`: error of the program before the pass, against float64, as root mean square
    - `error`: the number that the contract bounds. EXACT: change of the computed logits. ROUNDING: error of the new
      program against float64, as root mean square. LOSSY: equal to `meaning`
    - `relative`: `error` as a multiple of the largest logit
    - `allowed`: maximum of `error`; None if the contract sets none
    - `lost`: number of logits that were not finite before the pass; they are excluded
    - `kl`: KL divergence in nats, for a LOSSY pass; None for others
    """

    name: str
    entry: str
    bucket: str | None
    numerics: str
    changed: bool
    meaning: float
    before: float
    error: float
    relative: float
    allowed: float | None
    lost: int = 0
    kl: float | None = None


@dataclass(frozen=True)
class NumericsReport:
    """The numerics of a compile, measured on sample requests with the real weights.

    - `sample`: lengths of the sample requests, in tokens
    - `passes`: effect of each pass, in order
    - `overflows`: the first overflow of the traced model, before any pass, by entry (a program of the model, such as
      "main")
    - `weights`: statistics of the weights
    - `unmeasured`: why an entry was not measured, by entry
    """

    sample: tuple[int, ...]
    passes: tuple[PassNumerics, ...]
    overflows: Mapping[str, Overflow]
    weights: tuple[WeightStatistic, ...]
    unmeasured: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Infinities and NaN, which JSON lacks, become null."""
        return {
            "sample": list(self.sample),
            "passes": [_finite(asdict(one)) for one in self.passes],
            "overflows": {entry: asdict(one) for entry, one in self.overflows.items()},
            "weights": [_finite(asdict(one)) for one in self.weights],
            "unmeasured": dict(self.unmeasured),
        }


class NumericsCheck:
    """Measures every pass of a compile against its numerics contract (EXACT, ROUNDING or LOSSY), on sample inputs.

    Call `begin` first, then `on_pass` for each pass. `read` takes a name and returns the checkpoint tensor.
    """

    def __init__(self, model: Model, limits: Limits, read: Read) -> None:
        self._dtype, self._read = model.spec.dtype, read
        self._requests = sample_requests(model.spec.vocab_size, limits)
        self._params = _SharedParams(read)
        self._logits: dict[str, Measured] = {}
        self._passes: list[PassNumerics] = []
        self._overflows: dict[str, Overflow] = {}
        self._weights: tuple[WeightStatistic, ...] = ()
        self._model = model
        found = {name: _unmeasured(program) for name, program in model.entries.items()}
        self._unmeasured = {name: reason for name, reason in found.items() if reason}

    def begin(self) -> None:
        """Record where the traced model overflows, and the statistics of its weights, before any pass."""
        self._weights = weight_statistics(self._model.entries.values(), self._read)
        for entry, program in self._model.entries.items():
            if entry in self._unmeasured:
                continue
            if overflow := first_nonfinite(program, self._params.of(program), self._steps(program)):
                self._overflows[entry] = overflow

    def report(self) -> NumericsReport:
        lengths = tuple(map(len, self._requests))
        measured = tuple(self._passes), dict(self._overflows), self._weights
        return NumericsReport(lengths, *measured, dict(self._unmeasured))

    def on_pass(self, before: Program, after: Program) -> None:
        """Run the program before and after a pass on the sample inputs, and compare their logits.

        Raises NumericsError if the pass breaks its numerics contract.
        """
        if after.name in self._unmeasured:
            return
        one = after.history[-1]
        # Not the record's texts: another hook may have changed the program since then.
        if _body(before) == _body(after):
            self._passes.append(_measured(one, changed=False))
            return
        old = self._measured(before)
        try:
            new = self._measured(after)
        except VerifyError as error:  # ranks that return different values, for example
            raise self._unrunnable(before, after, one, error) from error
        if one.numerics is Numerics.LOSSY:
            self._check_weights(before, after, one)
        if problem := breach(one.numerics, old, new, self._dtype):
            differs = changed_meaning if changed_meaning(old, new) else by_contract(one.numerics, self._dtype)
            raise _broken(one, problem, self._located(before, after, differs))
        numbers = deviation(one.numerics, old, new, self._dtype)
        kl = kl_divergence(old.exact, new.exact) if one.numerics is Numerics.LOSSY else None
        self._passes.append(replace(_measured(one, changed=True), **asdict(numbers), kl=kl))

    def _measured(self, program: Program) -> Measured:
        key = _body(program)
        if key not in self._logits:
            params = self._params.of(program)
            measured = measure(program, params, self._requests, chunk=self._chunk(), seed=_SEED)
            self._logits[key] = measured.logits
        self._logits[key] = self._logits.pop(key)  # move to the end: eviction is in order of last use
        while len(self._logits) > _KEPT:
            del self._logits[next(iter(self._logits))]
        return self._logits[key]

    def _unrunnable(self, before: Program, after: Program, one: PassRecord, error: VerifyError) -> NumericsError:
        where = None
        with contextlib.suppress(VerifyError):  # the program fails before there are values to compare
            where = self._located(before, after, changed_meaning)
        return NumericsError(
            f"after pass {one.name} the program returns no logits: {error.what}",
            where=_where(one, where),
            expected="what the program before computes",
        )

    def _check_weights(self, before: Program, after: Program, one: PassRecord) -> None:
        """Check a LOSSY pass that quantized weights. Raises NumericsError if it changed more than their rounding.

        Each quantized weight must be within the error of its format. Then the program before the pass is computed with
        equally rounded weights, and must return what the new program returns. A pass that quantized nothing is not
        checked here.
        """
        old, new = self._params.of(before), self._params.of(with_originals(after))
        for wrong in weight_breaches(before, after, old, new):
            raise _broken(one, wrong.breach, wrong.param)
        rounded, params = with_rounded_weights(before, after, old, new)
        if rounded.params.keys() == before.params.keys():
            return
        expected, found = (
            logits_of(program, values, self._requests, exact=True, chunk=self._chunk(), seed=_SEED)
            for program, values in ((rounded, params), (after, new))
        )
        if problem := changed_meaning(Measured(expected, expected), Measured(found, found)):
            left, right = (
                record(program, values, self._steps(program), only_exact=True)
                for program, values in ((rounded, params), (after, new))
            )
            text = f"besides the rounding of weights, {problem}"
            raise _broken(one, replace(problem, text=text), first_divergence(left, right))

    def _located(self, before: Program, after: Program, differs: Differs) -> Divergence | None:
        """Return the first tensor in which the two programs differ, or None if there is none.

        The programs are compared in one step of all tokens. If that finds nothing, they are compared in the
        smaller steps whose error this check has measured. `differs` decides whether two tensors differ.
        """
        chunks = [None, self._chunk()] if before.input_types().keys() == after.input_types().keys() else [None]
        for chunk in chunks:
            left, right = (
                record(program, self._params.of(program), self._steps(program, chunk)) for program in (before, after)
            )
            if found := first_divergence(left, right, differs):
                return found
        return None

    def _steps(self, program: Program, chunk: int | None = None) -> list[Inputs]:
        return step_inputs(program.input_types(), self._requests, chunk=chunk, seed=_SEED)

    def _chunk(self) -> int:
        """Return how many tokens of a sequence one step takes.

        The number is a multiple of the model's granule. A granule is tokens that see each other, such as a diffusion
        block, and stay together.
        """
        granule = math.lcm(*map(granule_of, self._model.entries.values()))
        return min(-(-_CHUNK // granule) * granule, max(map(len, self._requests)))


def _unmeasured(program: Program) -> str:
    """Return why the passes of an entry (a program of the model) cannot be measured, or "" if they can."""
    unknown = [name for name in program.input_types() if find_input(name) is None]
    if unknown:  # the ending reads them from rows that an earlier step of another entry wrote
        return f"its ending '{program.ending.name}' reads {', '.join(unknown)} from rows that other entries write"
    if {"logits", "hidden"}.isdisjoint(program.outputs):
        return "it returns neither logits nor hidden states, on which passes are measured"
    return ""


def sample_requests(vocab: int, limits: Limits) -> list[list[int]]:
    """Return the token ids of the sample requests, up to three requests of up to 33 tokens.

    They are within the limits. Their tokens are spread over the whole vocabulary.
    """
    lengths = [min(length, limits.max_seq_len) for length in _LENGTHS[: limits.max_batch]]
    # Two primes spread neighbouring tokens over the vocabulary and keep requests different.
    return [
        [(index * 7919 + place * place * 104729 + 5) % vocab for place in range(length)]
        for index, length in enumerate(lengths)
    ]


class _SharedParams:
    """Makes the params of programs from checkpoint tensors, by their recipes (the steps that make a param).

    It keeps the results for the last two programs. So the program after a pass reuses results of the program before it.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._memo: dict[Recipe, Results] = {}
        self._used: tuple[frozenset[Recipe], ...] = ()

    def of(self, program: Program) -> _Params:
        params = rank_params(program, self._read, self._memo)
        steps = frozenset(
            replace(spec.recipe.for_rank(rank), output="")
            for spec in program.params.values()
            for rank in ranks(program.mesh)
        )
        if steps not in self._used:
            self._used = (*self._used, steps)[-2:]
        wanted: frozenset[Recipe] = frozenset().union(*self._used)
        self._memo = {step: results for step, results in self._memo.items() if step in wanted}
        return params


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _body(program: Program) -> str:
    """Return a program's text without its first line, which holds its name, stage and bucket class."""
    return print_program(program).partition("\n")[2]


def _measured(one: PassRecord, *, changed: bool) -> PassNumerics:
    return PassNumerics(one.name, one.entry, one.bucket, one.numerics.value, changed, 0.0, 0.0, 0.0, 0.0, None)


def _where(one: PassRecord, tensor: Divergence | str | None) -> str:
    place = f"program {one.entry}" + (f", bucket class {one.bucket}" if one.bucket else "")
    if tensor is None:
        return place
    if isinstance(tensor, str):
        return f"{place}; param {tensor}"
    return f"{place}; first at {tensor}" + (f", made by {', '.join(tensor.made)}" if tensor.made else "")


def _broken(one: PassRecord, problem: Breach, tensor: Divergence | str | None) -> NumericsError:
    return NumericsError(
        f"pass {one.name} broke its numerics contract, {one.numerics.value}: {problem}",
        where=_where(one, tensor),
        expected=f"an error of at most {problem.allowed:.3g}; it is {problem.error:.3g}, "
        f"{problem.relative_error:.3g} of the largest value",
        hint=f"--passes default,-{one.name} compiles without it" if one.name in OPTIONAL else "",
    )
