"""The first pass whose program does not keep what the program before it means, promises or is typed as."""

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

# Outputs that a near tie may turn over without anybody's fault: what is sampled, and what is said of it.
_SAMPLED = frozenset({"tokens", "logprob_ids", "logprobs", "ranks", "last_token"})


@dataclass(frozen=True)
class Culprit:
    """The pass that does harm: the link that it made, and how its program breaks what it owes.

    `what` is "meaning", "quantization", "numerics" or "structure"; `place` that of the link in the chain.
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
    """Judges the programs of one case by prompts drawn by one seed; each program is run once."""

    case: Case
    seed: int = 0
    _expected: dict[tuple[str, int], Expectation] = field(default_factory=dict)
    _means: dict[tuple[int, str, bool], str | None] = field(default_factory=dict)
    _measured: dict[tuple[str, str], dict[str, Measured]] = field(default_factory=dict)

    def expectation(self, chain: Chain, place: int) -> Expectation:
        """What holds for the programs after the link at `place`, which sets the meaning."""
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
        """How the program of `link` means something else; None when it does not."""
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
        """How what the lossy pass of `link` made is worse than its formats."""
        self.case.runs += 2
        requests = [Request(tuple(prompt), len(prompt)) for prompt in self.case.prompts(self.seed)]
        return broken_quantization(self.case.params, link.before, program, whole(requests, (1, 1)))

    def measured(self, expected: Expectation, program: Program, key: str = "") -> dict[str, Measured]:
        """The outputs of all steps as the program computes them in its own dtypes, and as it should in float64, by
        name."""
        if not key or (known := self._measured.get((str(id(expected)), key))) is None:
            known = self._run(expected, program)
            if key:
                self._measured[str(id(expected)), key] = known
        return known

    def _run(self, expected: Expectation, program: Program) -> dict[str, Measured]:
        self.case.runs += 1
        steps, params = expected.steps(program, forced=True), self.case.params(program)
        found = [one.outputs for one in observe(program, params, steps, expected.pages, exact=False)]
        # Whose numerics are judged means what is expected, which has been computed already.
        exact = [expected.told(program, number, step) for number, step in enumerate(steps)]
        if any(name not in one for one in exact for name in program.outputs):
            self.case.runs += 1
            exact = [one.outputs for one in observe(program, params, steps, expected.pages, exact=True)]
        order = torch.cat([step.places for step in steps]).argsort()
        result = {}
        for name in program.outputs:
            values = [torch.cat([one[name] for one in side]) for side in (found, exact)]
            if values[0].is_floating_point():  # a bucket class may give the same numbers in a narrower dtype
                values[0] = wide(values[0])
            if values[0].shape[0] == order.shape[0] and name not in program.states:
                values = [value[order] for value in values]
            result[name] = Measured(*values)
        return result

    def numerics(self, expected: Expectation, before: Link, after: Link) -> str | None:
        """How the pass between two links broke its contract in the model's own dtype; None when it kept it."""
        if before.computation == after.computation or after.one is None:
            return None
        old = self.measured(expected, before.program, before.computation)
        new = self.measured(expected, after.program, after.computation)
        return self.broken(after.one.numerics, old, new)

    def broken(self, numerics: Numerics, old: Mapping[str, Measured], new: Mapping[str, Measured]) -> str | None:
        """How outputs break a contract, in words. One that has no value for every row of the other is not judged."""
        dtype = self.case.request.spec.dtype
        for name in [name for name in new if name in old]:
            if numerics is Numerics.ROUNDING and name in _SAMPLED:
                continue
            if found := breach(numerics, old[name], new[name], dtype):
                return f"{name}: {found.text}"
        return None


def blame_pass(case: Case, judge: Judge) -> Culprit | None:
    """The first pass that does harm, on any way through the pipeline; None when all keep what they owe."""
    for chain in case.chains:
        found = _structure(chain) or _meaning(chain, judge) or _numerics(chain, judge)
        if found is not None:
            return found
    return None


def breaks_rules(link: Link, program: Program) -> str | None:
    """How a program that `link`'s pass made breaks the rules of its stage, or changed the types of outputs."""
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
    """Where the meaning of the program at `place` is set: by the last lossy pass up to there, or the trace."""
    lossy = [
        index
        for index, link in enumerate(chain.links[: place + 1])
        if link.one is not None and link.one.numerics is Numerics.LOSSY
    ]
    return lossy[-1] if lossy else 0


def segments(chain: Chain) -> list[tuple[int, int]]:
    """The stretches of a chain within which the meaning stays: first and last place of each."""
    places = range(len(chain.links))
    bases = sorted({base_of(chain, place) for place in places})
    return list(zip(bases, [*(base - 1 for base in bases[1:]), len(chain.links) - 1], strict=True))


def _meaning(chain: Chain, judge: Judge) -> Culprit | None:
    """By halves: once the meaning is lost, no pass brings it back."""
    for base, last in segments(chain):
        link = chain.links[base]
        if link.one is not None and (problem := judge.quantization(link, link.program)):
            return Culprit(chain, base, "quantization", problem)
        expected = judge.expectation(chain, base)
        # What the plan was made of comes from elsewhere in the artifact than the programs before it.
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
    """In order: how far a program may lie from float64 depends on the one before it. Passes that leave the computation
    as it was cost nothing."""
    for base, last in segments(chain):
        expected = judge.expectation(chain, base)
        for place in range(base + 1, last + 1):
            before, after = chain.links[place - 1], chain.links[place]
            if problem := judge.numerics(expected, before, after):
                return Culprit(chain, place, "numerics", problem)
    return None


def _page_size(chain: Chain) -> int:
    """Tokens in a page of the caches, as the pass that makes them was told."""
    for link in chain.links:
        size = getattr(link.one, "page_size", None)
        if isinstance(size, int):
            return size
    return 16
