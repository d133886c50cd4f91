"""Merge the lowered programs of a model: one plan for each entry, and one set of weights for all."""

from collections.abc import Mapping, Sequence
from functools import reduce

from ingot.ir.artifact.plan import Executable, Plan, PlanFile, Plans, ResidentMemory
from ingot.ir.errors import VerifyError
from ingot.ir.outputs import may_stand_for
from ingot.ir.parse import parse_type
from ingot.ir.program import ParamSpec, StateSpec, merged_params
from ingot.passes.manager import Lowered
from ingot.passes.plan_memory import weight_bytes


def resident_params(lowered: Mapping[str, Lowered]) -> dict[str, ParamSpec]:
    """Return the params that stay in memory while serving, by name: all that any program reads.

    `lowered` maps an entry, such as "main", to its programs, one for each bucket class (range of step sizes).
    """
    return merged_params(program for one in lowered.values() for program in one.programs.values())


def merged_plans(lowered: Mapping[str, Lowered], order: tuple[str, ...] = ("main",)) -> Plans:
    """Return the plans (the instructions for all steps) of a model, one for each entry.

    An entry is a program of the model, such as "main" or a draft model. `order` names the entries that run in each
    step, in order. Raises VerifyError if two entries define a state of one name differently.
    """
    _check_states(lowered)
    weights = weight_bytes(resident_params(lowered).values())
    merged = {entry: _merged_plan(_plans(one)) for entry, one in lowered.items()}
    return Plans(plans={entry: _with_weights(plan, weights) for entry, plan in merged.items()}, round=order)


def staged_plans(lowered: Mapping[str, Lowered], order: tuple[str, ...] = ("main",)) -> list[Plans]:
    """Return the plans of each pipeline stage of a model: one for each entry, as `merged_plans` returns them."""
    specs = resident_params(lowered)
    stages = []
    for parts in zip(*(program.stages for program in lowered["main"].programs.values()), strict=True):
        plan = _merged_plan(list(parts))
        weights = weight_bytes(specs[name] for name in plan.params)
        stages.append(Plans(plans={"main": _with_weights(plan, weights)}, round=order))
    return stages


def stage_folders(file: PlanFile) -> dict[str, str]:
    """Return the folder of weights that one pipeline stage alone reads, by the name of the param.

    The params of several stages are left out, and all params of a model without stages.
    """
    readers: dict[str, set[int]] = {}
    for plans in file.positions.values():
        for plan in plans.plans.values():
            if plan.stage is not None:
                for name in plan.params:
                    readers.setdefault(name, set()).add(plan.stage[0])
    return {name: f"stage{min(stages)}" for name, stages in readers.items() if len(stages) == 1}


def _plans(lowered: Lowered) -> list[Plan]:
    return [program.plan for program in lowered.programs.values() if program.plan is not None]


def _check_states(lowered: Mapping[str, Lowered]) -> None:
    known: dict[str, tuple[str, StateSpec]] = {}
    for entry, one in lowered.items():
        for name, spec in one.fused.states.items():
            other, wanted = known.setdefault(name, (entry, spec))
            if spec != wanted:
                made = next((node.meta.get("origin", "") for node in one.fused.find(name).users), "")
                raise VerifyError(
                    f"the state '{name}' is {spec.type} ({spec.kind}, group {spec.group})",
                    where=f"entry {entry}, {made}",
                    expected=f"{wanted.type} ({wanted.kind}, group {wanted.group}), as in the entry {other}",
                )


def _merged_plan(plans: list[Plan]) -> Plan:
    """Return the plan (the instructions for all steps) of one entry, a program of the model such as "main".

    `plans` has the plan of each bucket class (range of step sizes). Fields that do not depend on the bucket class are
    equal in all of them.
    """
    executables: dict[str, Executable] = {}
    for item in (executable for plan in plans for executable in plan.executables.values()):
        known = executables.get(item.id, item)  # the class with the larger steps has the larger workspace
        executables[item.id] = max(known, item, key=lambda one: one.workspace)
    return plans[0].model_copy(
        update={
            "dims": {name: bounds for plan in plans for name, bounds in plan.dims.items()},
            "outputs": {name: _widest(name, [plan.outputs[name] for plan in plans]) for name in plans[0].outputs},
            "inputs": {name: text for plan in plans for name, text in plan.inputs.items()},
            "params": {name: text for plan in plans for name, text in plan.params.items()},
            "states": {name: state for plan in plans for name, state in plan.states.items()},
            "executables": dict(sorted(executables.items())),
            "libraries": {name: item for plan in plans for name, item in plan.libraries.items()},
            "buckets": tuple(bucket for plan in plans for bucket in plan.buckets),
            "memory": _merged_memory([plan.memory for plan in plans]),
        }
    )


def _widest(output: str, types: Sequence[str]) -> str:
    """Return the type among `types` that also admits the values of all other types.

    `types` are the types of the output `output` in each bucket class (range of step sizes).
    """

    def wider(one: str, other: str) -> str:
        return one if may_stand_for(parse_type(other), parse_type(one), output) else other

    return reduce(wider, types)


def _merged_memory(memories: list[ResidentMemory]) -> ResidentMemory:
    """Return the memory that an entry (a program of the model) needs: the maximum of each field of `memories`.

    `memories` has one item for each bucket class (range of step sizes). The cache groups are equal in all.
    """
    names = [name for name in ResidentMemory.model_fields if name != "groups"]
    return memories[0].model_copy(update={name: max(getattr(one, name) for one in memories) for name in names})


def _with_weights(plan: Plan, size: int) -> Plan:
    """Return the plan of one program with `size` as its bytes of weights. All programs of the model share weights."""
    return plan.model_copy(update={"memory": plan.memory.model_copy(update={"weights": size})})
