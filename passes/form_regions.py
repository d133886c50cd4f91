"""form-regions: groups calls of a region compiler into regions, and merges equal regions."""

import heapq
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import RegionCompiler
from ingot.ir.program import VIEWS, Program, Region, RegionCall
from ingot.ir.text import print_region_body
from ingot.passes.base import Pass, PassContext
from ingot.passes.call_bodies import region_body, serving_dims
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.rewrite import Rewriter
from ingot.passes.stages import stage_of_calls


@dataclass(frozen=True)
class FormRegions(Pass):
    """Groups connected calls into regions. A backend compiles each region as a whole.

    Only some backends compile regions, and calls of other backends separate them. Equal layers have equal regions,
    which are compiled once. So the number of compiled regions does not grow with the number of layers.
    """

    name: ClassVar[str] = "form-regions"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        eliminate_dead_code(program)  # a region must not compute unused values
        by_text = {print_region_body(region.body): region for region in program.regions.values()}
        for backend, members in _regions(rewriter, context):
            if all(node.target in VIEWS for node in members):
                for node in members:  # views compute nothing, so they need no region
                    node.meta["backend"] = "reference"
                continue
            if not rewriter.take(members[-1]):
                continue
            body, inputs, outputs = region_body(program, members, f"r{len(program.regions)}")
            if backend.compiles_calls:  # its code may rely on the bounds of this bucket class
                body.dims = serving_dims(program, body)
            region = by_text.get(print_region_body(body))
            if region is None:
                region = Region(body.name, body, backend.name)
                by_text[print_region_body(body)] = region
                program.regions[region.name] = region
            _call_region(rewriter, region, members, inputs, outputs)
        _sort(program)


def _regions(rewriter: Rewriter, context: PassContext) -> list[tuple[RegionCompiler, list[fx.Node]]]:
    """Return a pair for each region: the backend that compiles it, and its calls.

    A backend may group the calls itself. Calls for which a fusion would change results too much are in no region.
    """
    program = rewriter.program
    stages = stage_of_calls(program, context.first_layers) if context.first_layers else {}
    found: list[tuple[RegionCompiler, list[fx.Node]]] = []
    for backend in context.backends:
        if not isinstance(backend, RegionCompiler):
            continue
        members = []
        for node in program.calls():
            if node.meta.get("backend") != backend.name:
                continue
            if reason := rewriter.skipped.get(str(node.meta.get("origin", "")), ""):
                rewriter.refuse(node, reason)
            else:
                members.append(node)
        cover = backend.cover(members)
        for one in _groups(program, {backend.name}) if cover is None else cover:
            found += [(backend, part) for part in _by_stage(one, stages)]
    return found


def _by_stage(members: list[fx.Node], stages: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the calls of a region, divided by pipeline stage. `stages` is empty if there is only one."""
    parts: dict[int, list[fx.Node]] = {}
    for node in members:
        parts.setdefault(stages.get(node, 0), []).append(node)
    return list(parts.values())


def _is_member(node: fx.Node, compilers: set[str]) -> bool:
    if node.op != "call_function" or isinstance(node.target, RegionCall):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_member(source, compilers)
    return node.meta.get("backend") in compilers


def _groups(program: Program, compilers: set[str]) -> list[list[fx.Node]]:
    """Return groups of connected calls of the backends `compilers`, in program order. Each group can run as one call.

    The level of a call is the number of calls of other backends on the longest path to it. Between two calls of one
    level there is no such call. So connected calls of one level form a group.
    """
    levels: dict[fx.Node, int] = {}
    leader: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node in program.graph.nodes:
        member = _is_member(node, compilers)
        level = 0
        for source in node.all_input_nodes:
            outside = source.op == "call_function" and source not in leader
            level = max(level, levels[source] + (1 if member and outside else 0))
        levels[node] = level
        if member:
            leader[node] = node
            for source in node.all_input_nodes:
                if source in leader and levels[source] == level:
                    leader[find(source)] = find(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in leader:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _call_region(
    rewriter: Rewriter, region: Region, members: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]
) -> None:
    last = members[-1]
    call = rewriter.call(RegionCall(region.name), *inputs, before=last, origin=_origin(members))
    call.meta["backend"] = region.backend
    for index, node in enumerate(outputs):
        if len(outputs) == 1:
            value = call
        else:
            value = rewriter.call(operator.getitem, call, index, before=last, origin=node.meta.get("origin", ""))
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in members)
    for node in reversed(members):
        rewriter.program.graph.erase_node(node)


def _origin(members: list[fx.Node]) -> str:
    """Return the source lines of a region's first and last call in the model definition, as text; "" if unknown."""
    origins = [node.meta["origin"] for node in members if node.meta.get("origin")]
    return " … ".join(dict.fromkeys([origins[0], origins[-1]])) if origins else ""


def _sort(program: Program) -> None:
    """Sort a program's calls so that each comes after its arguments. Apart from that, the order stays."""
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    place = {node: index for index, node in enumerate(nodes)}
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node in nodes if waiting[node] == 0]
    output = program.graph.output_node()
    while ready:
        node = nodes[heapq.heappop(ready)]
        output.prepend(node)
        for user in node.users:
            if user in waiting:
                waiting[user] -= 1
                if waiting[user] == 0:
                    heapq.heappush(ready, place[user])
