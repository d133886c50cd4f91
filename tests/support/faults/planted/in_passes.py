"""Faults of passes: one rewrite, known by the name of its anchor, leaves something else than it should."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import IngotError
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes import cse
from ingot.passes.base import Pass, PassContext
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.pipeline import ON_REQUEST, PIPELINE, SHARDING
from ingot.passes.rewrite import Rewriter
from planted.changes import Change, nodes_of, same_type, value_name, with_users
from planted.fault import Fault, NoFault, Setup, Truth, replaced
from planted.wrong_rewrites import bogus_rewrites, wrong_rewrites

# Passes that rewrite nothing in these models: what they do wrong is to rewrite something.
BOGUS = ("normalize", "choose-layouts")
PASSES: dict[str, type[Pass]] = {
    **{one.name: type(one) for phase in (*PIPELINE, SHARDING) for one in phase.passes},
    **ON_REQUEST,
}


@dataclass(frozen=True)
class Application:
    """One run of a pass in a healthy compile."""

    before: Program
    after: Program

    @property
    def record(self) -> PassRecord:
        return self.after.history[-1]

    def is_this(self, program: Program, context: PassContext) -> bool:
        bucket = context.bucket.name if context.bucket else None
        return program.stage is self.before.stage and bucket == self.record.bucket and program.name == self.after.name


@dataclass
class Recorder:
    """A hook that keeps every application of a pass."""

    seen: list[Application]

    def __call__(self, before: Program, after: Program) -> None:
        self.seen.append(Application(before, after))


def draw(name: str, setup: Setup, applications: list[Application], draw: random.Random) -> Fault:
    """A fault of the pass `name`. Raises NoFault where it has nothing to get wrong."""
    runs = [one for one in applications if one.record.name == name]
    if not runs:
        raise NoFault(f"{name} does not run for {setup}")
    # A bucket class may have no work for the pass.
    chosen = draw.choice([one for one in runs if one.record.rewrites] or runs)
    if name == "cse":
        return _unequal_joined(setup, chosen, draw)
    if name in BOGUS:
        return _bogus(name, setup, chosen, draw)
    if not chosen.record.rewrites:
        raise NoFault(f"{name} rewrites nothing in {setup}")
    rewrite = draw.choice(chosen.record.rewrites)
    known = set(nodes_of(chosen.before))
    for earlier in chosen.record.rewrites[: rewrite.index]:
        known |= set(earlier.made)
    made = set(rewrite.made) or _changed(chosen, rewrite.anchor)
    change = _pick(wrong_rewrites(chosen.after, made, known), chosen, draw)
    truth = Truth("pass", name, change.what, _distinct(change.wrong), rewrite.anchor, chosen.record.bucket)

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with _behind(name, lambda rewriter, context: _spoil(rewriter, context, chosen, rewrite.anchor, change)):
            yield

    return Fault(change.name, setup, truth, plant)


def _changed(run: Application, anchor: str) -> set[str]:
    """Where a rewrite edits in place what it is anchored at."""
    return {anchor} if anchor in nodes_of(run.after) else set()


def _pick(changes: list[Change], run: Application, draw: random.Random) -> Change:
    """A class first, then one of it, so that many wrong inputs do not crowd out one wrong epsilon."""
    by_name: dict[str, list[Change]] = {}
    for change in changes:
        by_name.setdefault(change.name, []).append(change)
    while by_name:
        name = draw.choice(sorted(by_name))
        change = by_name[name].pop(draw.randrange(len(by_name[name])))
        if not by_name[name]:
            del by_name[name]
        if _verifies(change, run):
            return change
    raise NoFault(f"{run.record.name} can do nothing wrong there that verifies")


def _verifies(change: Change, run: Application) -> bool:
    program = run.after.copy()
    try:
        change.apply(program)
        eliminate_dead_code(program)
        verify(program, under=Stage[run.record.stage])
    except (IngotError, KeyError, AssertionError):
        return False
    return True


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


@contextlib.contextmanager
def _behind(name: str, more: Callable[[Rewriter, PassContext], None]) -> Iterator[None]:
    """`more` runs at the end of every run of the pass."""
    one = PASSES[name]
    run = one.run

    def planted(self: Pass, rewriter: Rewriter, context: PassContext) -> None:
        run(self, rewriter, context)
        more(rewriter, context)

    with replaced(one, "run", planted):
        yield


def _spoil(rewriter: Rewriter, context: PassContext, run: Application, anchor: str, change: Change) -> None:
    if run.is_this(rewriter.program, context) and any(one.anchor == anchor for one in rewriter.rewrites()):
        eliminate_dead_code(rewriter.program)
        change.apply(rewriter.program)


def _bogus(name: str, setup: Setup, run: Application, draw: random.Random) -> Fault:
    found = [
        item for item in bogus_rewrites(run.before, param_only=name == "choose-layouts") if _verifies_before(item, run)
    ]
    if not found:
        raise NoFault(f"{name} finds nothing to spoil in {setup}")
    anchor, change = draw.choice(found)
    truth = Truth("pass", name, change.what, _distinct((*change.wrong, anchor)), anchor, run.record.bucket)

    def rewrite(rewriter: Rewriter, context: PassContext) -> None:
        node = nodes_of(rewriter.program).get(anchor)
        if node is not None and run.is_this(rewriter.program, context) and rewriter.take(node):
            change.apply(rewriter.program)

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with _behind(name, rewrite):
            yield

    return Fault(change.name, setup, truth, plant)


def _verifies_before(item: tuple[str, Change], run: Application) -> bool:
    before = run.before.copy()
    before.history = run.after.history
    return _verifies(item[1], Application(run.before, before))


def _unequal_joined(setup: Setup, run: Application, draw: random.Random) -> Fault:
    """cse takes two calls of one op, or two params, for equal that are not."""
    found = []
    program = run.before
    # Of what the pass leaves: what it joins by rights cannot be joined wrongly.
    left = set(nodes_of(run.after))
    nodes = [node for node in [*program.placeholders("param"), *program.calls()] if value_name(node) in left]
    for index, second in enumerate(nodes):
        for first in nodes[:index]:
            alike = first.op == second.op and (first.op == "placeholder" or first.target == second.target)
            if alike and same_type(first, second) and cse._key(second, program) is not None:
                found.append((value_name(first), value_name(second)))
    if not found:
        raise NoFault(f"cse finds no two calls alike in {setup}")
    first_name, second_name = draw.choice(found)
    key = cse._key

    def planted(node: fx.Node, program: Program) -> Any:
        if value_name(node) == second_name and program.stage is run.before.stage:
            first = nodes_of(program).get(first_name)
            if first is not None and not first._erased:
                return key(first, program)
        return key(node, program)

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with replaced(cse, "_key", planted):
            yield

    second_node = nodes_of(program)[second_name]
    first_node = nodes_of(program)[first_name]
    what = f"{second_name} is taken for {first_name}"
    wrong = _distinct((*with_users(second_node), *with_users(first_node)))
    truth = Truth("pass", "cse", what, wrong, second_name, run.record.bucket)
    return Fault("unequal joined", setup, truth, plant)
