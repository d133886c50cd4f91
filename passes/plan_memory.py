"""Compute the memory of a plan: the peak allocation of a step, and the memory that stays between steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ingot.ir.artifact.plan import BucketMemory, Instruction, ResidentMemory, Value
from ingot.ir.backend import FunctionBackend
from ingot.ir.cache.memory import PlannedState, state_memory
from ingot.ir.errors import PassError
from ingot.ir.features import find_ending
from ingot.ir.infer import sized_meta_tensor
from ingot.ir.interpret import interpret
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.ir.mesh import with_rank_rows
from ingot.ir.ops import op_of
from ingot.ir.parse import parse_type
from ingot.ir.program import VIEWS, ParamSpec, Program, RegionCall, target_name
from ingot.ir.types import LOADED_DIMS, StateType, TensorType
from ingot.passes.base import PassContext
from ingot.passes.dry_run import peak_bytes


def bucket_memory(
    program: Program,
    nodes: Sequence[fx.Node],
    instructions: Sequence[Instruction],
    values: Mapping[str, Value],
    workspaces: Mapping[str, int],
    context: PassContext,
) -> BucketMemory:
    """Return the peak memory of activations in the program's largest step, and which instruction reaches it.

    nodes        the calls of `instructions`, in order
    values       name -> value of the plan
    workspaces   name of a region or compiled call -> peak bytes that one run allocates in that step
    """
    sizes = largest_step(program)
    live = peak = place = 0
    views: dict[str, int] = {}  # the number of live values in each storage
    for name, value in values.items():
        if value.buffer == "received":
            live, views[name] = live + _held(value, sizes), 1
    known: dict[str, int] = {}  # by the call's text: layers repeat a few dozen calls
    for number, (node, instruction) in enumerate(zip(nodes, instructions, strict=True)):
        made = [name for name in instruction.results if name]
        taken = sum(_held(values[name], sizes) for name in made)
        if isinstance(node.target, RegionCall):
            needed = workspaces[node.target.name]
        elif "compiled" in node.meta:
            needed = workspaces[node.meta["compiled"]]
        else:
            text = _text(node, program)
            needed = known[text] if text in known else _call_bytes(node, program, sizes, context)
            known[text] = needed
        inside = live + max(taken, needed)
        if inside > peak:
            peak, place = inside, number
        live += taken
        for name in made:
            holder = values[name].of or name
            views[holder] = views.get(holder, 0) + 1
        for name in instruction.frees:
            holder = values[name].of or name
            views[holder] -= 1
            if not views[holder] and holder in values:  # inputs and params stay
                live -= _held(values[holder], sizes)
    return BucketMemory(sizes=sizes, activations=peak, peak=place)


def region_workspaces(program: Program, context: PassContext) -> Mapping[str, int]:
    """Return for each region, by name, the peak bytes that one run allocates in the largest step, with its results.

    Regions are calls compiled together. Calls that are compiled alone are included.
    """
    sizes = largest_step(program)
    regions = {**program.regions, **program.compiled}
    if context.measure is not None:
        # The allocation of a call does not depend on the size of the pool that it writes to.
        return context.measure(list(regions.values()), {"pages": 1, "S": sizes.get("B", 1), **sizes})
    return {name: _body_bytes(region.body, sizes) for name, region in program.regions.items()}


def _body_bytes(body: Program, sizes: Mapping[str, int]) -> int:
    values = {name: sized_meta_tensor(value_type, sizes) for name, value_type in body.input_types().items()}
    return peak_bytes(interpret, (body, values), {})


def resident_memory(program: Program, sizes: Mapping[str, int]) -> ResidentMemory:
    """Return the memory that stays allocated between steps: weights, states such as KV caches, inputs and outputs.

    `sizes` maps symbolic dims, such as "T", to their sizes in the largest step.
    """
    # Use the dims of the plan, as in check_plan: the largest step of a bucket class may have fewer tokens.
    most = {dim.name: dim.hi for dim in program.dims.values()}
    planned = {name: PlannedState(spec.group, spec.type, most) for name, spec in program.states.items()}
    states, slot, groups = state_memory(planned)
    outputs = [node.meta["type"] for node in program.output_nodes().values()]
    return ResidentMemory(
        weights=weight_bytes(program.params.values()),
        states=states,
        slot=slot,
        groups=groups,
        inputs=sum(type_bytes(value_type, sizes) for value_type in program.input_types().values()),
        outputs=sum(type_bytes(item, sizes) for item in outputs if isinstance(item, TensorType)),
    )


def weight_bytes(specs: Iterable[ParamSpec]) -> int:
    """Return the bytes of all weights in memory.

    Weights with equal recipe (how it is made), placement (over ranks) and type share one tensor, which counts once.
    """
    distinct = {(spec.recipe, spec.placement, spec.type) for spec in specs}
    return sum(type_bytes(value_type, {}) for _, _, value_type in distinct)


def largest_step(program: Program) -> dict[str, int]:
    """Return the size of each symbolic dim, such as "T", in the largest step of the program's bucket class.

    Each sequence of a step has at least one token, and one row of logits. If the ending takes several tokens of a
    sequence at once, such as drafts, each has a row. Up to MAX_SCORED more rows score prompt tokens.
    """
    assert program.bucket is not None
    sizes = {dim.name: dim.hi for dim in program.dims.values() if dim.name not in LOADED_DIMS}
    sizes["T"] = min(sizes.get("T", program.bucket.tokens[1]), program.bucket.tokens[1])
    if "B" in sizes:
        sizes["B"] = min(sizes["B"], sizes["T"])
    if "G" in sizes:
        sizes["G"] = min(sizes["G"], sizes["T"])
    if "L" in sizes:
        rows = sizes.get("B", sizes["T"]) * find_ending(program.ending.name).fed(program.ending)
        sizes["L"] = min(sizes["L"], sizes["T"], rows + MAX_SCORED)
    return with_rank_rows(sizes, program.mesh) if "T_tp" in sizes else sizes


def _held(value: Value, sizes: Mapping[str, int]) -> int:
    """Return the bytes that are allocated for a value in a step; 0 for a view of another value.

    `sizes` maps symbolic dims, such as "T", to their sizes in the step.
    """
    return 0 if value.of else type_bytes(parse_type(value.storage or value.type), sizes)


def type_bytes(value_type: TensorType, sizes: Mapping[str, int]) -> int:
    return math.prod(value_type.bind(sizes)) * value_type.dtype.itemsize


def _text(node: fx.Node, program: Program) -> str:
    """Return a text for a call. Calls with equal texts need equal memory.

    It is the text of the call, with types in place of the names of values.
    """

    def typed(source: fx.Node) -> str:
        value_type = source.meta["type"]
        return str(program.states[value_type.name].type if isinstance(value_type, StateType) else value_type)

    args, kwargs = fx.node.map_arg(node.args, typed), fx.node.map_arg(node.kwargs, typed)
    return f"{node.meta['backend']} {target_name(node.target)} {args} {kwargs}"


def _call_bytes(node: fx.Node, program: Program, sizes: Mapping[str, int], context: PassContext) -> int:
    """Return the peak bytes that a call allocates in a step, with its results.

    The call runs on tensors without data. Raises PassError if that fails. `sizes` maps symbolic dims, such as "T", to
    their sizes in the step.
    """
    if node.target in VIEWS:
        return 0
    # States as large as the step can reach: the memory gathered from pages depends on the page table.
    sizes = {**sizes, "S": sizes.get("B", 1), "pages": sizes.get("B", 1) * sizes.get("P", 1)}

    def tensor(source: fx.Node) -> Any:
        value_type = source.meta["type"]
        if isinstance(value_type, StateType):
            value_type = program.states[value_type.name].type
        return sized_meta_tensor(value_type, sizes)

    args, kwargs = fx.node.map_arg(node.args, tensor), fx.node.map_arg(node.kwargs, tensor)
    for backend in context.backends:
        if backend.name == node.meta["backend"] and isinstance(backend, FunctionBackend):
            form = backend.dry_run(node)
            break
    else:
        raise PassError(f"no backend '{node.meta['backend']}' with functions is known", where=f"%{node.name}")
    op = op_of(node.target)
    try:
        return peak_bytes(form, args, kwargs)
    except Exception as error:
        raise PassError(
            f"the memory of {target_name(node.target)} cannot be planned: {type(error).__name__}: {error}",
            where=f"%{node.name}, {node.meta.get('origin', '')}",
            expected="a form that reads no data" if op is None else f"op '{op.name}' defined with `costliest`",
        ) from error
