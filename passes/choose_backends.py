"""choose-backends: assigns a backend to every call, and records each refusal with its reason."""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.backend_times import BackendTimes, Decision
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Claim, No, RegionCompiler, Yes, alternatives, call_compilers
from ingot.ir.errors import PassError, TargetError
from ingot.ir.layout import Layout, layouts_of
from ingot.ir.program import Program, Region, is_call, target_name
from ingot.ir.text import print_region_body
from ingot.ir.types import TensorType
from ingot.ir.weights import formats_of_call
from ingot.passes.base import Contest, Pass, PassContext
from ingot.passes.call_bodies import call_body, region_body
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class ChooseBackends(Pass):
    """Chooses a backend for every call. Each backend says whether it can compute a call, and at which cost.

    If several backends can compute a call alone, they are timed, and the slower ones are left out. Of the others, the
    lowest cost is chosen. In deterministic mode, results of a backend must not depend on the other requests of a step.
    """

    name: ClassVar[str] = "choose-backends"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        usable: dict[fx.Node, dict[str, Yes]] = {}
        for node in program.calls():
            if node.target is not operator.getitem:
                usable[node] = _usable(rewriter, node, context)
                node.meta["candidates"] = {name: claim.cost for name, claim in usable[node].items()}
        chosen = {node: min(claims, key=lambda name: claims[name].cost) for node, claims in usable.items()}
        contests = _contests(program, usable, chosen, context)
        anyway = partial(_compiled_anyway, program, contests, chosen, context)
        for node, decided in zip(contests, _decided(list(contests.values()), context, anyway), strict=True):
            node.meta["contest"] = decided
            if isinstance(decided, BackendTimes):
                chosen[node] = choice_of(usable[node], decided)
            node.meta["decision"] = Decision.of(decided, chosen[node])
        for node, backend in chosen.items():
            if rewriter.take(node):
                node.meta["backend"] = backend


def _usable(rewriter: Rewriter, node: fx.Node, context: PassContext) -> dict[str, Yes]:
    """Return for each backend, by name, its cheapest claim (offer to compute the call `node`).

    Record why other backends cannot compute it. Raises PassError if no backend can.
    """
    claims, reasons = claims_of(node, _outside_regions(rewriter, node, context))
    for reason in reasons:
        rewriter.refuse(node, reason)
    if not claims and is_call(node, ops.experts.overload) and (formats := formats_of_call(node)):
        names = " and ".join(dict.fromkeys(format.name for format in formats))
        raise TargetError(
            f"experts in format {names} do not run on {context.target.name}: {'; '.join(reasons)}",
            where=f"%{node.name}, {node.meta.get('origin', '')}",
            expected="a format that a backend of the target reads, such as int8",
            hint="keep their numbers with --quantize-ignore, or dequantize the weights of a quantized checkpoint: "
            '--passes "default,-adopt-quantized"; --backend reference computes them slowly',
        )
    if not claims:
        by = f" by the mask {node.kwargs['mask']}" if "mask" in node.kwargs else ""
        other = "as backend='auto'" if context.target.device == "cpu" else "as backend='reference', which is slow"
        raise PassError(
            f"no backend computes {target_name(node.target)}{by}: {'; '.join(reasons)}",
            where=f"%{node.name}, {node.meta.get('origin', '')}",
            expected=f"a claim of {' or '.join(backend.name for backend in context.backends)}",
            hint=f"compile with another backend, {other}, or for another target"
            + (", or without deterministic" if context.deterministic else ""),
        )
    return claims


def _outside_regions(rewriter: Rewriter, node: fx.Node, context: PassContext) -> PassContext:
    """Return the context with the backends that may compute a call.

    A call may be excluded from fusion with others. Then backends that compile only regions (calls compiled together)
    are removed, and their refusals are recorded.
    """
    skipped = context.skipped_fusions.get((rewriter.program.name, "form-regions"), {})
    reason = skipped.get(str(node.meta.get("origin", "")), "")
    if not reason:
        return context
    barred = [one for one in context.backends if isinstance(one, RegionCompiler) and not one.compiles_calls]
    for backend in barred:
        rewriter.refuse(node, f"{backend.name}: {reason}")
    return replace(context, backends=tuple(one for one in context.backends if one not in barred))


def claims_of(node: fx.Node, context: PassContext) -> tuple[dict[str, Yes], list[str]]:
    """Return for each backend, by name, its cheapest claim (offer to compute the call `node`).

    The second result has a reason for each backend without a claim. A claim must fit the layouts of the weights. In
    deterministic mode, its results must not depend on the other requests of a step.
    """
    assert context.bucket is not None
    claims: dict[str, Yes] = {}
    reasons: list[str] = []
    layouts = layouts_of(node)
    for backend in context.backends:
        answer = backend.claim([node], context.target, context.bucket)
        taking = [yes for yes in alternatives(answer) if yes.takes(layouts)]
        counting = [yes for yes in taking if context.counts(yes)]
        if counting:
            claims[backend.name] = min(counting, key=lambda yes: yes.cost)
        else:
            reasons.append(f"{backend.name}: {_reason(answer, taking, layouts)}")
    return claims, reasons


def _reason(answer: Claim, taking: list[Yes], layouts: Mapping[str, Layout]) -> str:
    if isinstance(answer, No):
        return answer.reason
    if taking:
        return "not batch-invariant"
    wanted = sorted({f"{name} {layout.value}" for yes in alternatives(answer) for name, layout in yes.layouts.items()})
    present = ", ".join(f"{name} {layout.value}" for name, layout in sorted(layouts.items()))
    return f"it needs {', '.join(wanted)}, but the program has {present}"


# Contests: calls with several backends to choose from by timing.


def choice_of(claims: Mapping[str, Yes], times: BackendTimes) -> str:
    """Return the backend for a call, by name: the lowest cost among those that timing has not shown to be slow.

    `claims` are the claims by backend, and `times` those of the backends that were timed. All of these but the fastest
    are left out. A compiler of regions is not timed, and may claim a lower cost than the fastest one.
    """
    left = [name for name in claims if name == times.backend or name not in times.times]
    return min(left, key=lambda name: claims[name].cost)


def _contests(
    program: Program,
    usable: Mapping[fx.Node, Mapping[str, Yes]],
    chosen: Mapping[fx.Node, str],
    context: PassContext,
) -> dict[fx.Node, Contest]:
    """Return the calls that several backends can compute alone, outside regions, each with its Contest.

    usable   call -> backend name -> the backend's claim (offer to compute the call)
    chosen   call -> name of the backend with the lowest cost
    """
    compilers = [one for one in context.backends if isinstance(one, RegionCompiler) and not one.compiles_calls]
    alone = {
        one.name: _alone(one, [node for node, claims in usable.items() if one.name in claims]) for one in compilers
    }
    backends = {
        node: [name for name, claim in claims.items() if claim.timed and (name not in alone or node in alone[name])]
        for node, claims in usable.items()
    }
    contested = {node: names for node, names in backends.items() if len(names) > 1 and chosen[node] in names}
    inside = _in_regions({chosen[node] for node in contested} - alone.keys(), chosen, context)
    return {
        node: Contest(
            call_body(program, node, "call"),
            tuple(sorted(names, key=lambda name: usable[node][name].cost)),
            {name: region_body(program, [node], "call")[0] for name in names if name in alone},
        )
        for node, names in contested.items()
        if node not in inside
    }


def _alone(backend: RegionCompiler, nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Return the calls among `nodes` that a compiler of regions would compile alone, each as a region of one call.

    Timing such a call says as much as timing a call of a library. `nodes` are all calls that `backend` claims.
    """
    cover = backend.cover(nodes) if nodes else None
    single = (group[0] for group in cover or () if len(group) == 1)
    # A region has one input for a value that a call reads twice, and no states: it can be called like the call itself.
    return frozenset(
        node
        for node in single
        if isinstance(node.meta["type"], TensorType)
        and len(_tensors(node)) == len(set(_tensors(node)))
        and all(isinstance(one.meta["type"], TensorType) for one in _tensors(node))
    )


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call. One that occurs twice is there twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _in_regions(names: Collection[str], chosen: Mapping[fx.Node, str], context: PassContext) -> frozenset[fx.Node]:
    """Return the calls that the backends `names` compile together with other calls, in regions.

    Timing such a call alone says little. `chosen` maps each call to its backend.
    """
    inside: set[fx.Node] = set()
    for backend in context.backends:
        if isinstance(backend, RegionCompiler) and backend.name in names:
            members = [node for node, name in chosen.items() if name == backend.name]
            cover = backend.cover(members)
            inside.update(members if cover is None else (node for group in cover for node in group))
    return frozenset(inside)


def _compiled_anyway(
    program: Program, contests: Collection[fx.Node], chosen: Mapping[fx.Node, str], context: PassContext
) -> list[Region]:
    """Return the calls that are compiled alone, whatever timing decides. Each is a region of one call.

    Equal calls become one region. They are compiled in parallel with the code for timing.
    """
    compilers = {backend.name for backend in call_compilers(context.backends)}
    inside = _in_regions(compilers, chosen, context)
    found: dict[str, Region] = {}
    for node, backend in chosen.items():
        if backend in compilers and node not in inside and node not in contests:
            body = call_body(program, node, f"anyway{len(found)}")
            found.setdefault(print_region_body(body), Region(body.name, body, backend))
    return list(found.values())


def _decided(
    contests: list[Contest], context: PassContext, anyway: Callable[[], list[Region]]
) -> list[BackendTimes | str]:
    """Return for each Contest (a call with several possible backends) the times of its backends.

    If they are not timed, the item is the reason instead, and the lowest cost wins. `anyway` returns regions to compile
    in parallel with the timing.
    """
    found: dict[str, BackendTimes | str] = {}
    undecided: dict[str, Contest] = {}
    for one in contests:
        given = context.decided.get(one.key)
        if given is None:
            undecided[one.key] = one
        elif given.backend in one.backends:
            found[one.key] = given
        else:
            found[one.key] = f"the given log has {given.backend}, which does not compute the call here"
    if undecided and context.time_calls is not None:
        found |= zip(undecided, context.time_calls(list(undecided.values()), anyway), strict=True)
    return [found.get(one.key, "backends are not timed here") for one in contests]
