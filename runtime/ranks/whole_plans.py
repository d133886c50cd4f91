"""The plans of all pipeline stages together, as the scheduler sees them."""

from ingot.ir.artifact.plan import GroupMemory, PlanFile, Plans


def whole_plans(file: PlanFile) -> Plans:
    """Return the plans that describe a step of all ranks: its inputs, its ending and its KV cache groups.

    `file` has the plans of each rank. Ranks with equal plans have those. With pipeline stages, the inputs and groups
    are those of any stage, and the ending is that of the last one. No process can run such a plan.
    """
    stages = list(file.positions.values())
    if len(stages) == 1:
        return stages[0]
    each = [plans.plans["main"] for plans in stages]
    groups: dict[str, GroupMemory] = {}
    for plan in each:
        for name, group in plan.memory.groups.items():
            before = groups.get(name)
            page = group.page + (0 if before is None else before.page)
            groups[name] = group.model_copy(update={"page": page})
    last = each[-1]
    main = last.model_copy(
        update={
            "inputs": {name: text for plan in each for name, text in plan.inputs.items()},
            "states": {name: state for plan in each for name, state in plan.states.items()},
            "memory": last.memory.model_copy(update={"groups": groups}),
        }
    )
    return stages[-1].model_copy(update={"plans": {"main": main}})
