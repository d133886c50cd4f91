"""Find the first pass that changes what a program computes, breaks its numerics contract, or makes an invalid
program."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ingot.debug.bisect.case import Case
from ingot.debug.bisect.programs.chain import Chain, Link
from ingot.debug.bisect.programs.expectation import Expectation, expect, rebased
from ingot.debug.bisect.programs.observe import observe
from ingot.debug.bisect.programs.quantized import broken_quantization
from ingot.debug.bisect.programs.schedule import Request, is_cached, whole
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import VerifyError
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.ops.registry import wide
from ingot.ir.outputs import may_stand_for
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify

# Outputs that a near tie may change without a fault: sampled tokens, and values that depend on them.
_SAMPLED = frozenset({"tokens", "logprob_ids", "logprobs", "ranks", "last_token"})


@dataclass(frozen=True)
class Culprit:
    """A faulty pass. `chain` has the programs of the compile in order. The pass made the program with the index
    `place`.

    `text` describes the fault. `what` is its kind:

    meaning        the outputs change, even in float64
    quantization   errors are larger than the storage format of the weights explains
    numerics       errors in the model's dtype are larger than the pass declares
    structure      the program is invalid
    """

    chain: Chain
    place: int
    what: str
    text: str

    @property
    def link(self) -> Link:
        return self.chain.links[self.place]


@dataclass
class Judge:
    """Checks programs of one compile against their expected outputs, on random prompts.

    `seed` is the seed of the prompts. Results are kept and reused, so that programs do not run twice.
    """

    case: Case
    seed: int = 0
    _expected: dict[tuple[str, int], Expectation] = field(default_factory=dict)
    _means: dict[tuple[int, str, bool], str | None] = field(default_factory=dict)
    _measured: dict[tuple[str, str], dict[str, Measured]] = field(default_factory=dict)

    def expectation(self, chain: Chain, place: int) -> Expectation:
        """Return the outputs that programs of a chain must have. A chain has the programs of a compile in order.

        The program with the index `place` computes these outputs.
        """
        link = chain.links[place]
        key = chain.entry, id(link)
        if key not in self._expected:
            program = link.program
            self.case.runs += 1
            if is_cached(program):
                before = self.expectation(chain, base_of(chain, place - 1))
                self._expected[key] = rebased(before, program, self.case.params(program))
            else:
                self._expected[key] = expect(
                    program,
                    self.case.params(program),
                    self.case.prompts(self.seed),
                    rows=self.case.request.limits.max_batch,
                    page_size=_page_size(chain),
                    seed=self.seed,
                )
        return self._expected[key]

    def meaning(self, expected: Expectation, link: Link, *, at_once: bool = False) -> str | None:
        """Run the program `link.program` in float64. Return how its outputs differ from the expected ones, in words.

        Return None if they do not differ. With `at_once`, one step processes all tokens.
        """
        key = id(expected), link.computation, at_once
        if key not in self._means:
            self._means[key] = self.meaning_of(expected, link.program, at_once=at_once)
        return self._means[key]

    def meaning_of(self, expected: Expectation, program: Program, *, at_once: bool = False) -> str | None:
        self.case.runs += 1
        found = expected.difference(program, self.case.params(program), at_once=at_once)
        if found is None:
            return None
        return f"in float64 {found.output or 'the program'}, step {found.step}: {found.text}"

    def quantization(self, link: Link, program: Program) -> str | None:
        """Check the accuracy of `program`, the result of a quantizing pass. Return what is wrong, in words.

        Return None if the storage formats of the weights explain all errors. `link.before` is the program before the
        pass.
        """
        self.case.runs += 2
        requests = [Request(tuple(prompt), len(prompt)) for prompt in self.case.prompts(self.seed)]
        return broken_quantization(self.case.params, link.before, program, whole(requests, (1, 1)))

    def measured(self, expected: Expectation, program: Program, key: str = "") -> dict[str, Measured]:
        """Run `program` on the steps of `expected`. Return a mapping from output names to results.

        Each result has two tensors, one computed in the program's dtypes and one in float64. A later call with the same
        `key` returns the results without a run. With the key "", results are not kept.
        """
        if not key or (known := self._measured.get((str(id(expected)), key))) is None:
            known = self._run(expected, program)
            if key:
                self._measured[str(id(expected)), key] = known
        return known

    def _run(self, expected: Expectation, program: Program) -> dict[str, Measured]:
        self.case.runs += 1
        steps, params = expected.steps(program, forced=True), self.case.params(program)
        found = [one.outputs for one in observe(program, params, steps, expected.pages, exact=False)]
        # Numerics are judged only for programs with the expected meaning, whose float64 values are known already.
        exact = [expected.known_outputs(program, number, step) for number, step in enumerate(steps)]
        if any(name not in one for one in exact for name in program.outputs):
            self.case.runs += 1
            exact = [one.outputs for one in observe(program, params, steps, expected.pages, exact=True)]
        order = torch.cat([step.places for step in steps]).argsort()
        result = {}
        for name in program.outputs:
            values = [torch.cat([one[name] for one in side]) for side in (found, exact)]
            if values[0].is_floating_point():  # a bucket class may return the same numbers in a narrower dtype
                values[0] = wide(values[0])
            if values[0].shape[0] == order.shape[0] and name not in program.states:
                values = [value[order] for value in values]
            result[name] = Measured(*values)
        return result

    def numerics(self, expected: Expectation, before: Link, after: Link) -> str | None:
        """Check the errors of the pass that made `after` from `before`, in the model's dtype.

        A pass declares its numerics: EXACT, ROUNDING or LOSSY. Return how it breaks them, in words; None if it does
        not. The programs run on the steps of `expected`.
        """
        if before.computation == after.computation or after.one is None:
            return None
        old = self.measured(expected, before.program, before.computation)
        new = self.measured(expected, after.program, after.computation)
        return self.broken(after.one.numerics, old, new)

    def broken(self, numerics: Numerics, old: Mapping[str, Measured], new: Mapping[str, Measured]) -> str | None:
        """Compare the outputs before a pass, `old`, with the outputs after it, `new`. Return how they break the
        declared `numerics` of the pass, in words; None if they do not.

        Under ROUNDING, sampled tokens are not compared: rounding may change which of two nearly equal logits is larger.
        """
        dtype = self.case.request.spec.dtype
        for name in [name for name in new if name in old]:
            if numerics is Numerics.ROUNDING and name in _SAMPLED:
                continue
            if found := breach(numerics, old[name], new[name], dtype):
                return f"{name}: {found.text}"
        return None


def blame_pass(case: Case, judge: Judge) -> Culprit | None:
    """Return the first faulty pass of a compile; None if all passes are right.

    The programs of all entries (such as `main`) and bucket classes (ranges of step sizes) are checked.
    """
    for chain in case.chains:
        found = _structure(chain) or _meaning(chain, judge) or _numerics(chain, judge)
        if found is not None:
            return found
    return None


def breaks_rules(link: Link, program: Program) -> str | None:
    """Check the structure of `program`, the result of a pass. Return what is invalid, in words; None if nothing is.

    The program must obey the rules of its stage in the pipeline. Its outputs must have types that can replace the types
    before the pass. `link` has the pass and the program before it.
    """
    try:
        verify(program, under=min(link.under, Stage.LOWERED), after=link.name)
    except VerifyError as error:
        return str(error)
    if link.previous is not None:
        before, after = link.previous.program.output_nodes(), program.output_nodes()
        for name in before:
            if name not in after or not may_stand_for(after[name].meta["type"], before[name].meta["type"], name):
                found = after[name].meta["type"] if name in after else "gone"
                return f"output '{name}' is {found}, before {before[name].meta['type']}"
    return None


def _structure(chain: Chain) -> Culprit | None:
    for place, link in enumerate(chain.links):
        if link.one is not None and (problem := breaks_rules(link, link.program)):
            return Culprit(chain, place, "structure", problem)
    return None


def base_of(chain: Chain, place: int) -> int:
    """Return the index of the program that defines the right outputs of program `place` in a chain.

    A lossy pass may change the outputs. So it is the result of the last lossy pass up to `place`. Without a lossy pass
    it is 0, the traced program.
    """
    lossy = [
        index
        for index, link in enumerate(chain.links[: place + 1])
        if link.one is not None and link.one.numerics is Numerics.LOSSY
    ]
    return lossy[-1] if lossy else 0


def segments(chain: Chain) -> list[tuple[int, int]]:
    """Split a chain of programs into ranges in which all programs must have equal outputs.

    A lossy pass may change the outputs, so its result begins a new range. Return the first and the last index of each
    range.
    """
    places = range(len(chain.links))
    bases = sorted({base_of(chain, place) for place in places})
    return list(zip(bases, [*(base - 1 for base in bases[1:]), len(chain.links) - 1], strict=True))


def _meaning(chain: Chain, judge: Judge) -> Culprit | None:
    """Find the first pass of a chain that changes the outputs in float64; None if no pass does.

    The pass is found by bisection. This works because later passes do not make wrong outputs right again.
    """
    for base, last in segments(chain):
        link = chain.links[base]
        if link.one is not None and (problem := judge.quantization(link, link.program)):
            return Culprit(chain, base, "quantization", problem)
        expected = judge.expectation(chain, base)
        # The final program comes from another file of the artifact than the programs before it.
        ends = [end for end in (last - 1, last) if end > base and judge.meaning(expected, chain.links[end])]
        if not ends:
            continue
        good, bad = base, ends[0]
        while bad - good > 1:
            middle = (good + bad) // 2
            if judge.meaning(expected, chain.links[middle]) is None:
                good = middle
            else:
                bad = middle
        return Culprit(chain, bad, "meaning", judge.meaning(expected, chain.links[bad]) or "")
    return None


def _numerics(chain: Chain, judge: Judge) -> Culprit | None:
    """Find the first pass of a chain with larger errors in the model's dtype than it declares; None if no pass has.

    Passes are checked in order, since the allowed error depends on the program before the pass. A pass that does not
    change the computation is skipped.
    """
    for base, last in segments(chain):
        expected = judge.expectation(chain, base)
        for place in range(base + 1, last + 1):
            before, after = chain.links[place - 1], chain.links[place]
            if problem := judge.numerics(expected, before, after):
                return Culprit(chain, place, "numerics", problem)
    return None


def _page_size(chain: Chain) -> int:
    """Return the number of tokens in a page of the KV cache, an option of the pass that inserts caches.

    Return 16 if no pass has this option.
    """
    for link in chain.links:
        size = getattr(link.one, "page_size", None)
        if isinstance(size, int):
            return size
    return 16
