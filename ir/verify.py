"""The verifier: checks the rules of a program's stage after every pass. It cannot be turned off."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from ingot.ir.errors import VerifyError
from ingot.ir.infer import infer
from ingot.ir.infer_placement import check_param, check_state, infer_placement, placement_of, spot_text
from ingot.ir.ops import OPS, Effect, op_of
from ingot.ir.ops.aten import ATEN
from ingot.ir.ops.stand_ins import rows_of_part
from ingot.ir.program import VIEWS, Program, RegionCall, Stage, states_written, target_name
from ingot.ir.text import print_call, value_name
from ingot.ir.types import Dim, StateType, TensorType, TupleType, ValueType


@dataclass(frozen=True)
class StageRules:
    """The rules of a pipeline stage: what it allows or requires in a program.

    mesh      the program may be on a mesh, and then every value has a placement
    open      ops that the pass insert-collectives replaces are allowed
    cached    ops that read and write states are allowed, and the ops that they replaced are not
    fused     ops that can be decomposed into simpler ops are allowed
    pruned    the result of every call must be used
    regions   calls of regions (sets of calls that are compiled together) are allowed
    backends  every call must name its backend
    planned   the program must have a plan, the instructions for the runtime
    """

    mesh: bool = False
    open: bool = False
    cached: bool = False
    fused: bool = False
    pruned: bool = True
    regions: bool = False
    backends: bool = False
    planned: bool = False

    def ops(self) -> frozenset[str]:
        """Return the names of the ops that the stage allows, as in a program's text.

        Ops of other packages are included.
        """
        barred = {"pure" if self.cached else "cached"} | (set() if self.open else {"open"})
        ops = (op for op in OPS.values() if op.legal not in barred)
        legal = {f"ingot.{op.name}" for op in ops if self.fused or not op.decompose}
        return frozenset(legal | ATEN.keys() | {"getitem"})


RULES: Mapping[Stage, StageRules] = {
    Stage.TRACED: StageRules(pruned=False, open=True),
    Stage.NORMAL: StageRules(open=True),
    Stage.QUANTIZED: StageRules(open=True),
    Stage.SHARDED: StageRules(mesh=True),
    Stage.CACHED: StageRules(mesh=True, cached=True),
    Stage.FUSED: StageRules(mesh=True, cached=True, fused=True),
    Stage.LOWERED: StageRules(mesh=True, cached=True, fused=True, regions=True, backends=True),
    Stage.PLANNED: StageRules(mesh=True, cached=True, fused=True, regions=True, backends=True, planned=True),
}


def verify(
    program: Program, *, under: Stage | None = None, after: str = "", around: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Raise VerifyError if the program breaks a rule of its pipeline stage.

    `under` names a later stage whose rules are checked instead. A pass uses it while it brings a program to that stage.
    Ops that are legal in the program's present stage then stay legal. `after` names the last pass, for the error
    message. `around` is the mesh of the program that calls this one, which is the body of a region: its values have no
    placements, which are inferred at each call.
    """
    rules = RULES[program.stage if under is None else under]
    legal = rules.ops() | (RULES[program.stage].ops() if under is not None and program.stage < under else frozenset())
    where = f"program {program.name}, stage {program.stage.name}" + (f", after pass {after}" if after else "")
    if program.mesh and not rules.mesh:
        raise VerifyError("the program is on a mesh before stage SHARDED", where=where)
    try:
        program.graph.lint()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise VerifyError(f"the graph is malformed: {first_line}", where=where) from error
    if not any(node.op == "output" for node in program.graph.nodes):
        raise VerifyError("the program returns nothing", where=where)
    if not around:  # the body of a region narrows the bounds
        _check_rank_rows(program, where)
    for node in program.graph.nodes:
        try:
            _check_node(node, program, rules, legal, around)
        except VerifyError as error:
            line = print_call(node) if node.op == "call_function" and "type" in node.meta else f"%{node.name}"
            at = f"{_at(node, where)}: {line}"
            raise VerifyError(error.what, where=at, expected=error.expected, hint=error.hint) from error
    _check_names(program, where)
    if len(program.outputs) != len(set(program.outputs)) or not program.outputs:
        raise VerifyError("outputs must be named, each once", where=_at(program.graph.output_node(), where))
    _check_states(program, where)
    _check_outputs(program, where)
    for region in program.regions.values():
        at = _at(next(iter(region.body.graph.nodes)), where)
        if not any(program.calls(RegionCall(region.name))):
            raise VerifyError(f"region '{region.name}' is never called", where=at)
        if region.body.states or region.body.params or region.body.regions:
            raise VerifyError(f"region '{region.name}' holds states, params or regions of its own", where=at)
        verify(region.body, under=Stage.FUSED, after=after, around=program.mesh)
    if rules.planned and program.plan is None:
        raise VerifyError("the program has no plan", where=_at(program.graph.output_node(), where))


def _at(node: fx.Node, where: str) -> str:
    """Return the location of a node for an error message.

    It is `where`, then the node's line and column if the program was parsed from text.
    """
    return f"{where}, {node.meta['place']}" if "place" in node.meta else where


def _check_rank_rows(program: Program, where: str) -> None:
    """Check the bounds of the rows of one rank. They follow from those of the tokens."""
    found, tokens, ranks = program.dims.get("T_tp"), program.dims.get("T"), program.mesh.get("tp")
    if found is None or tokens is None:
        return
    if ranks is None:
        raise VerifyError(f"dim {found} without ranks of tp", where=where, expected="a mesh with the axis tp")
    wanted = Dim("T_tp", rows_of_part(tokens.lo, ranks), rows_of_part(tokens.hi, ranks))
    if found != wanted:
        raise VerifyError(f"dim {found} on {ranks} ranks", where=where, expected=f"{wanted}, as {tokens}")


def _check_names(program: Program, where: str) -> None:
    """Check that no two values have one name in the program's text, and that each param and state has a placeholder."""
    names: set[str] = set()
    for node in program.graph.nodes:
        if node.op != "output" and value_name(node) in names:
            raise VerifyError(f"two values are named {value_name(node)}", where=_at(node, where))
        names.add(value_name(node))
    for kind, declared in (("param", list(program.params)), ("state", list(program.states))):
        placed = {str(node.target) for node in program.placeholders(kind)}
        for name in declared:
            if name not in placed:
                raise VerifyError(f"{kind} '{name}' has no placeholder", where=where)


def _check_node(
    node: fx.Node, program: Program, rules: StageRules, legal: frozenset[str], around: Mapping[str, int]
) -> None:
    if node.op == "output":
        return
    if node.op not in ("placeholder", "call_function"):
        raise VerifyError(f"a node of kind '{node.op}'", expected="placeholder, call_function or output")
    if "type" not in node.meta:
        raise VerifyError("a node without a type")
    value_type = node.meta["type"]
    _check_symbols(value_type, program)
    if node.op == "placeholder":
        _check_placeholder(node, program)
        return
    if isinstance(node.target, RegionCall):
        if not rules.regions:
            raise VerifyError("a region before stage LOWERED")
    elif target_name(node.target) not in legal:
        raise VerifyError(f"op {target_name(node.target)} is not legal here", expected=", ".join(sorted(legal)))
    if rules.pruned and not node.users:
        hint = "remove the call, or return the new version of the state that it writes"
        raise VerifyError("nothing uses the result", hint=hint)
    if rules.backends and node.target is not operator.getitem and "backend" not in node.meta:
        raise VerifyError("no backend was chosen")
    if node.target in VIEWS and any(isinstance(source.meta["type"], StateType) for source in node.all_input_nodes):
        raise VerifyError(
            "a view of a state", hint="read the state through an op: the next write would change the view"
        )
    _check_effect(node)
    inferred = infer(node.target, node.args, node.kwargs, program)
    if inferred != value_type:
        raise VerifyError(f"declared as {value_type}", expected=str(inferred))
    _check_placement(node, program, around)


def _check_placement(node: fx.Node, program: Program, around: Mapping[str, int]) -> None:
    declared = node.meta.get("placement", ())
    if not program.mesh:
        op = op_of(node.target)
        if op is not None and op.across is not None and node.kwargs.get("axis") not in around:
            raise VerifyError(
                f"the mesh has no axis '{node.kwargs.get('axis')}'",
                expected=", ".join(around) or "no collective on one device",
            )
        if declared:
            raise VerifyError("a placement without a mesh")
        return
    axis = node.kwargs.get("axis")
    if isinstance(axis, str) and axis not in program.mesh:
        raise VerifyError(f"the mesh has no axis '{axis}'", expected=", ".join(program.mesh))
    inferred = infer_placement(node, program)
    if declared != inferred:
        texts = (" ".join(map(str, places)) or "replicated" for places in (declared, inferred))
        raise VerifyError(f"declared as {next(texts)}", expected=next(texts))


def _check_outputs(program: Program, where: str) -> None:
    """Check that every rank of a mesh returns whole tensors, and that states keep their placement."""
    for name, node in program.output_nodes().items() if program.mesh else ():
        for place in placement_of(node, program):
            if not isinstance(node.meta["type"], StateType):
                raise VerifyError(
                    f"output '{name}' is {place}", where=where, expected=spot_text(None, place.axis), hint="gather it"
                )
            if place not in program.states[node.meta["type"].name].placement:
                raise VerifyError(f"state '{name}' ends as {place}", where=where, expected="the placement of its spec")


def _check_effect(node: fx.Node) -> None:
    """Check that an op that is given a state is declared to read or write states.

    Two passes trust this declaration: cse, which merges equal calls, and dce, which removes unused calls.
    """
    op = op_of(node.target)
    if op is None or op.effect in (Effect.READS_STATE, Effect.WRITES_STATE):
        return
    for source in node.all_input_nodes:
        if isinstance(source.meta["type"], StateType):
            raise VerifyError(
                f"op {target_name(node.target)} is declared {op.effect.value} and is given {value_name(source)}",
                expected=f"{Effect.READS_STATE.value}, where the op is defined",
            )


def _check_symbols(value_type: ValueType, program: Program) -> None:
    if isinstance(value_type, TupleType):
        for item in value_type.items:
            _check_symbols(item, program)
    elif isinstance(value_type, TensorType):
        for size in value_type.shape:
            if isinstance(size, str) and size not in program.dims:
                raise VerifyError(f"dim {size} is not declared", expected=", ".join(program.dims))
    elif value_type.name not in program.states:
        raise VerifyError(f"unknown state '{value_type.name}'", expected=", ".join(program.states))


def _check_placeholder(node: fx.Node, program: Program) -> None:
    tables: dict[str, Mapping[str, Any]] = {"param": program.params, "state": program.states}
    table = tables.get(node.meta["kind"], {})
    if node.meta["kind"] != "input" and node.target not in table:
        raise VerifyError(f"{node.meta['kind']} '{node.target}' is not declared")
    if node.meta["kind"] == "param" and program.params[str(node.target)].type != node.meta["type"]:
        raise VerifyError("the param's type differs from its spec", expected=str(program.params[str(node.target)].type))
    if node.meta["kind"] == "state":
        _check_symbols(program.states[str(node.target)].type, program)
    if node.meta["kind"] == "param":
        spec = program.params[str(node.target)]
        if program.mesh and spec.split is not None:
            raise VerifyError(f"param '{node.target}' is still to be split: {spec.split}", expected="a placement")
        if not program.mesh and spec.placement:
            raise VerifyError("a placement without a mesh", expected="a split, which says how a mesh would split it")
    if program.mesh and node.meta["kind"] != "input":
        (check_param if node.meta["kind"] == "param" else check_state)(str(node.target), program)


def _check_states(program: Program, where: str) -> None:
    """Check the versions of each state: no call reads a version after it is overwritten, and no two overwrite it.

    The program must return the last version.
    """
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    outputs = program.output_nodes()
    returned = _at(program.graph.output_node(), where)
    for placeholder in program.placeholders("state"):
        name = str(placeholder.target)
        version: fx.Node = placeholder
        while (writer := _writer(version, where)) is not None:
            for reader in version.users:
                if order[reader] > order[writer] and reader.op != "output":
                    raise VerifyError(
                        f"%{reader.name} reads a version of state '{name}' that %{writer.name} has overwritten",
                        where=_at(reader, where),
                    )
            version = _next_version(writer, name, where)
        if outputs.get(name) is not version:
            found = f"%{outputs[name].name}" if name in outputs else "nothing"
            raise VerifyError(
                f"state '{name}' is returned as {found}", where=returned, expected=f"%{version.name}, its last version"
            )
    for name, node in outputs.items():
        if isinstance(node.meta["type"], StateType) and node.meta["type"].name != name:
            raise VerifyError(f"output '{name}' is state '{node.meta['type'].name}'", where=returned)
        if isinstance(node.meta["type"], TupleType):
            raise VerifyError(f"output '{name}' is a tuple", where=returned, expected="its items, one by one")


def _writer(version: fx.Node, where: str) -> fx.Node | None:
    """Return the call that overwrites a version of a state; None if there is none.

    Raises VerifyError if there are two.
    """
    found = [user for user in version.users if version in states_written(user)]
    if len(found) > 1:
        writers = " and ".join(f"%{node.name}" for node in found)
        raise VerifyError(f"{value_name(version)} is overwritten twice, by {writers}", where=_at(found[1], where))
    return found[0] if found else None


def _next_version(writer: fx.Node, name: str, where: str) -> fx.Node:
    """Return the node that holds the new version of the state `name`, which the call `writer` writes.

    It is the call, or a `getitem` node if the call returns a tuple. Raises VerifyError if not exactly one node takes
    the new version.
    """
    if isinstance(writer.meta["type"], StateType):
        return writer
    found = [node for node in writer.users if node.target is operator.getitem and node.meta["type"] == StateType(name)]
    if len(found) != 1:
        takers = " and ".join(f"%{node.name}" for node in found) or "nothing"
        raise VerifyError(
            f"%{writer.name} writes state '{name}', but {takers} takes the new version", where=_at(writer, where)
        )
    return found[0]
