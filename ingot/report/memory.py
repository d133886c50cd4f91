"""The memory of serving, from a plan: what stays between steps, and what each instruction of a bucket class's largest
step uses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.ir.artifact.plan import Argument, BucketPlan, Instruction, Plan, Plans, Ref
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.parse import parse_type


@dataclass(frozen=True)
class Storage:
    """The memory of one value and its views, in bytes.

    Instruction number `first` of the step allocates it. It is freed after instruction number `last`.
    """

    name: str
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of the largest step of one bucket class (a range of step sizes), in bytes.

    - `sizes`: the symbolic dims of that step
    - `calls`: the target of each instruction
    - `scratch`: the memory that each instruction needs while it runs, besides its results
    - `activations`: the planned peak of the step
    - `peak`: the number of the instruction that reaches this peak

    The plan knows the scratch memory of regions (calls compiled together) and of instruction `peak`. Instructions that
    equal `peak` except for names have its scratch memory. For all other instructions, it is given as 0.
    """

    entry: str
    bucket: str
    sizes: Mapping[str, int]
    calls: tuple[str, ...]
    scratch: tuple[int, ...]
    storages: tuple[Storage, ...]
    activations: int
    peak: int


@dataclass(frozen=True)
class Resident:
    """The memory that stays allocated between steps, in bytes.

    - `weights`: the weights
    - `states`: the states with a row per running sequence, such as the last token
    - `inputs`: the buffers of step inputs
    - `outputs`: the outputs of the last step
    - `page`: one page of the KV caches
    - `sequence`: the KV cache of one sequence at full length
    - `scratch_pages`: pages that one step uses for a long prefill, in caches with a window
    - `slot`: the part of one sequence in states that are kept per sequence, such as those of convolutions
    """

    weights: int
    states: int
    inputs: int
    outputs: int
    page: int
    sequence: int
    scratch_pages: int
    slot: int


def step_memories(found: Plans) -> tuple[StepMemory, ...]:
    """Return the memory of the largest step of each bucket class (a range of step sizes).

    It covers all entries of the artifact, such as `main` and a draft model.
    """
    return tuple(_step_memory(plan, bucket) for plan in found.plans.values() for bucket in plan.buckets)


def _step_memory(plan: Plan, bucket: BucketPlan) -> StepMemory:
    sizes = bucket.memory.sizes
    first: dict[str, int] = {}  # by storage: the instruction that allocates it
    last: dict[str, int] = {}
    alive: dict[str, int] = {}  # by storage: the number of live values in it
    held: dict[str, int] = {}
    scratch: list[int] = []
    for number, instruction in enumerate(bucket.instructions):
        taken = 0
        for name in filter(None, instruction.results):
            value = bucket.values[name]
            holder = value.of or name
            alive[holder] = alive.get(holder, 0) + 1
            if value.of is None:
                first[name] = number
                held[name] = _bytes(value.storage or value.type, sizes)
                taken += held[name]
        for name in instruction.frees:
            holder = bucket.values[name].of or name
            alive[holder] -= 1
            if not alive[holder]:
                last[holder] = number
        executable = plan.executables.get(instruction.target.removeprefix("exe."))
        scratch.append(max(0, executable.workspace - taken) if executable else 0)
    end = len(bucket.instructions) - 1
    storages = tuple(Storage(name, held[name], begin, last.get(name, end)) for name, begin in first.items())
    peak = bucket.memory.peak
    at_peak = bucket.memory.activations - sum(one.size for one in storages if one.first <= peak <= one.last)
    types = {**plan.inputs, **plan.params, **{name: state.type for name, state in plan.states.items()}}
    types |= {name: value.type for name, value in bucket.values.items()}
    calls = [_unnamed(instruction, types) for instruction in bucket.instructions]
    return StepMemory(
        entry=plan.entry,
        bucket=bucket.bucket.name,
        sizes=sizes,
        calls=tuple(
            f"region {one.target[4:16]}" if one.target.startswith("exe.") else one.target for one in bucket.instructions
        ),
        scratch=tuple(at_peak if call == calls[peak] else own for call, own in zip(calls, scratch, strict=True)),
        storages=storages,
        activations=bucket.memory.activations,
        peak=peak,
    )


def _unnamed(instruction: Instruction, types: Mapping[str, str]) -> tuple[object, ...]:
    """Return a key of a call that is equal for calls with equal memory.

    It holds all facts about the call, with types in place of names. `types` maps the names of values to their types.
    """

    def typed(argument: Argument) -> object:
        return types[argument.ref] if isinstance(argument, Ref) else argument

    kwargs = {name: typed(value) for name, value in instruction.kwargs.items()}
    return (instruction.target, instruction.backend, *map(typed, instruction.args), str(kwargs))


def _bytes(type_text: str, sizes: Mapping[str, int]) -> int:
    value_type = parse_type(type_text)
    return math.prod(value_type.bind(sizes)) * value_type.dtype.itemsize


def resident(found: Plans) -> Resident:
    """Return the memory that stays allocated between steps, for all entries of the artifact together.

    Entries are programs, such as `main` and a draft model. They share the buffers of step inputs, so the largest ones
    count. The outputs of all entries count, because they may be in use at one time.
    """
    need = MemoryNeed.of(found)
    memories = [plan.memory for plan in found.plans.values()]
    return Resident(
        weights=need.weights,
        states=need.states,
        inputs=max(memory.inputs for memory in memories),
        outputs=sum(memory.outputs for memory in memories),
        page=need.page,
        sequence=need.sequence,
        scratch_pages=need.scratch_bytes,
        slot=need.slot,
    )
