"""Find the one faulty rewrite of a pass, and the faulty node in it. The pass runs again with limited fuel, the number
of rewrites that it may apply."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.debug.bisect.programs.blame_pass import Culprit, Judge, breaks_rules
from ingot.debug.bisect.programs.chain import Link
from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.expectation import Expectation
from ingot.debug.bisect.programs.locate import ObservedProgram, Site, locate
from ingot.debug.bisect.programs.observe import observe
from ingot.debug.bisect.programs.quantized import rounded, wrong_weight
from ingot.debug.bisect.programs.schedule import in_chunks, is_cached, whole
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics, Rewrite
from ingot.ir.errors import IngotError
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.program import Program
from ingot.ir.text import print_call, value_name

# Errors of programs that are half rewritten, or rewritten wrongly.
_UNFIT = (IngotError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Blame:
    """The faulty rewrite of a pass.

    before    the program without the faulty rewrite
    after     the program with the faulty rewrite
    rewrite   the rewrite; None if the fault is elsewhere in the code of the pass
    site      the faulty node in `after`; None if unknown
    changed   True if the installed pass makes another program than the artifact has
    fuel      the number of rewrites after which the fault first appears; None if the rewrite was found in another way
    """

    before: Program
    after: Program
    rewrite: Rewrite | None
    site: Site | None
    changed: bool = False
    fuel: int | None = None


def blame_rewrite(judge: Judge, culprit: Culprit, expected: Expectation) -> Blame:
    """Find the faulty rewrite of the pass `culprit`. `expected` has the right outputs.

    The pass runs again and may make only some of its rewrites. This is repeated until the first rewrite with the fault
    is found. If such partly rewritten programs cannot run, the first wrong value in the whole program names the
    rewrite.
    """
    link = culprit.link
    try:
        again, rewrites = link.again()
    except _UNFIT:
        again, rewrites = link.before, ()
    changed = _texts(again) != _texts(link.program)
    if not changed:
        try:
            if found := _by_fuel(judge, culprit, expected, len(rewrites)):
                return found
        except _UNFIT:
            pass  # with part of its rewrites, the pass makes no program that runs
    site = _site(judge, culprit, expected, link.before, link.program)
    if changed:
        site = _changed_node(again, link.program, site)
    rewrite = _rewrite_at(site, rewrites)
    if changed:
        rewrite = _unused(again, link.program, rewrites) or rewrite
    return Blame(link.before, link.program, rewrite, site, changed)


def _by_fuel(judge: Judge, culprit: Culprit, expected: Expectation, count: int) -> Blame | None:
    """Find the faulty rewrite by bisecting the fuel, the number of rewrites that the pass may make.

    `count` is the number of all rewrites of the pass. In the smallest run with the fault, the last rewrite is faulty.
    Return None if even the program with all rewrites does not have the fault.
    """
    harms = harm(judge, culprit, expected)
    link = culprit.link
    if not harms(link.program):
        return None
    least, most = -1, count
    while most - least > 1:
        middle = (least + most) // 2
        if harms(link.again(middle)[0]):
            most = middle
        else:
            least = middle
    after, rewrites = link.again(most) if most < count else (link.program, link.again()[1])
    if most == 0:
        return Blame(link.before, after, None, _site(judge, culprit, expected, link.before, after), fuel=0)
    before = link.again(most - 1)[0]
    site = _site(judge, culprit, expected, before, after)
    return Blame(before, after, rewrites[most - 1], site, fuel=most)


def harm(judge: Judge, culprit: Culprit, expected: Expectation) -> Callable[[Program], bool]:
    """Return a function that takes a program and returns whether it has the fault of `culprit`.

    The program is one that the pass of `culprit` made, perhaps with only some of its rewrites.
    """
    link = culprit.link
    if culprit.what == "quantization":
        return lambda program: judge.quantization(link, program) is not None
    if culprit.what == "structure":
        return lambda program: breaks_rules(link, program) is not None
    if culprit.what == "meaning":
        at_once = _takes_parts(link)
        return lambda program: judge.meaning_of(expected, program, at_once=at_once) is not None
    assert link.one is not None and link.previous is not None
    numerics, old = link.one.numerics, judge.measured(expected, link.previous.program, link.previous.computation)
    return lambda program: judge.broken(numerics, old, judge.measured(expected, program)) is not None


def _takes_parts(link: Link) -> bool:
    """Return whether the pass of `link` adds KV caches to attention.

    If it makes only some of its rewrites, the other attention calls have no cache. Such a program must get all tokens
    in one step.
    """
    return bool(link.program.states) and any(True for _ in link.before.calls(ops.attention.overload))


def _site(judge: Judge, culprit: Culprit, expected: Expectation, before: Program, after: Program) -> Site | None:
    if culprit.what == "structure":
        return None
    look = _site_of_quantization if culprit.what == "quantization" else _site_of_values
    try:
        return look(judge, culprit, expected, before, after)
    except _UNFIT:
        return None  # the pass and the rewrite are known without the node


def _site_of_quantization(
    judge: Judge, culprit: Culprit, expected: Expectation, before: Program, after: Program
) -> Site | None:
    if wrong := wrong_weight(judge.case.params, before, after):
        return Site(wrong[0], "param", "", wrong[0], "", wrong[1])
    like, params = rounded(judge.case.params, before, after)

    def watch(program: Program, names: set[str]) -> ObservedProgram:
        given = params if program is like else judge.case.params(program)
        steps = whole(expected.requests, expected.pool)
        seen = list(observe(program, given, steps, expected.pages, exact=True, watch=names))
        return ObservedProgram(program, given, seen, seen)

    return locate(like, after, watch, _differs(judge, culprit), {})


def _site_of_values(
    judge: Judge, culprit: Culprit, expected: Expectation, before: Program, after: Program
) -> Site | None:
    """Return the node of `after` that first computes a wrong value; None if none is found.

    Steps after the first one with wrong outputs are ignored, since that step may have caused their errors.

    The programs are run with generated tokens as step inputs first. A wrongly sampled token then does not make later
    inputs wrong.
    """
    at_once = is_cached(after) and any(True for _ in after.calls(ops.attention.overload))
    for forced in (True, False):
        count = None
        if culprit.what == "meaning":
            judge.case.runs += 1
            found = expected.difference(after, judge.case.params(after), forced=forced, at_once=at_once)
            if found is None:
                continue
            if found.node:
                return Site(found.node, "", "", found.node, "", found.text)
            count = found.step + 1
        known = expected.known(after, count, at_once=at_once)
        watch = _Watch(judge, expected, forced, at_once, count, is_cached(after))
        if site := locate(before, after, watch, _differs(judge, culprit), known):
            return site
    return None


@dataclass(frozen=True)
class _Watch:
    """A function that runs a program and records the values of named nodes.

    `count` is the number of steps to run, None for all steps. A program without caches runs all tokens in one step.
    Then only the tokens of the first `count` steps are compared.
    """

    judge: Judge
    expected: Expectation
    forced: bool
    at_once: bool
    count: int | None
    in_steps: bool

    def __call__(self, program: Program, names: set[str]) -> ObservedProgram:
        self.judge.case.runs += 2
        steps = self.expected.steps(program, forced=self.forced, at_once=self.at_once)
        rows = None
        if self.in_steps and not is_cached(program) and not self.at_once and self.count is not None:
            taken = in_chunks(self.expected.requests, self.expected.pool, by_device=False)[: self.count]
            rows = torch.cat([step.places for step in taken]).sort().values
        elif self.count is not None:
            steps = steps[: self.count]
        return ObservedProgram.run(program, self.judge.case.params(program), steps, self.expected.pages, names, rows)


def _differs(judge: Judge, culprit: Culprit) -> Callable[[Measured, Measured], str | None]:
    dtype, numerics = judge.case.request.spec.dtype, culprit.link.one.numerics if culprit.link.one else Numerics.EXACT

    def by_meaning(old: Measured, new: Measured) -> str | None:
        return differs(new.exact, old.exact)

    def by_contract(old: Measured, new: Measured) -> str | None:
        found = breach(numerics, old, new, dtype)
        return None if found is None else found.text

    return by_contract if culprit.what == "numerics" else by_meaning


def _texts(program: Program) -> dict[str, str]:
    """Return the texts of a program's parts, to compare it with another program.

    Keys are the names of calls, placeholders and regions, and "return" for the outputs.
    """
    found = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            found[value_name(node)] = print_call(node).partition("  # ")[0]
        elif node.op == "placeholder":
            spec = program.params.get(str(node.target)) or program.states.get(str(node.target))
            found[value_name(node)] = f"{node.meta['type']} {spec}"
    found["return"] = ", ".join(f"{name}={value_name(node)}" for name, node in program.output_nodes().items())
    for name, region in program.regions.items():
        found[f"region {name}"] = str(list(_texts(region.body).items()))
    return found


def _changed_node(again: Program, stored: Program, site: Site | None) -> Site | None:
    """Return the first node in which two programs differ. If none differs, return `site`.

    `stored` is the artifact's program. `again` is the program that the installed pass makes. `site` is the node of the
    first wrong value.
    """
    now = _texts(again)
    for node in stored.graph.nodes:
        if node.op == "output":
            continue
        name = value_name(node)
        text = _texts(stored)[name]
        if now.get(name) != text:
            blamed = Site(name[1:], "", node.meta.get("origin", ""), name[1:], "", "")
            kept = site or blamed
            return Site(
                blamed.node,
                text.partition(" = ")[2].partition("(")[0] or str(node.meta.get("kind", "")),
                blamed.origin,
                kept.tensor,
                kept.instead_of,
                f"the artifact has {text}, now it is {now.get(name, 'nothing')}; {kept.text}",
            )
    return site


def _unused(again: Program, stored: Program, rewrites: tuple[Rewrite, ...]) -> Rewrite | None:
    """Return the first rewrite of the installed pass with a result that the artifact's program lacks; None if there is
    none.

    `again` is the program that the installed pass makes. `stored` is the artifact's program.
    """
    gone = _texts(again).keys() - _texts(stored).keys()
    return next((rewrite for rewrite in rewrites if gone & {f"%{name}" for name in rewrite.made}), None)


def _rewrite_at(site: Site | None, rewrites: tuple[Rewrite, ...]) -> Rewrite | None:
    """Return the rewrite that made or replaced the faulty node; None if there is none among `rewrites`."""
    if site is None:
        return None
    for name in (site.node.partition("/")[0], site.tensor, site.instead_of):
        for rewrite in rewrites:
            if name and name in {one.removeprefix("%") for one in rewrite.made}:
                return rewrite
        for rewrite in rewrites:
            if name and rewrite.anchor.removeprefix("%") == name:
                return rewrite
    return None
