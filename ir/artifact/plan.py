"""The plan that the runtime executes: instructions per bucket class, the values between them, and executables.

These types are also the schema of plan.json. Tensor types are in their text form.
"""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import Mesh, world_size

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


# Steps of up to this many tokens are bound by reading weights. Kernels that read weights once, with cheap calls, beat
# compiled regions there. Measured with the bundled model on two cores with AVX-512, compiled with limits of 1 and of
# 64: a decode step of 16 takes 2.4 ms on kernels and 2.9 ms on regions, one of 32 takes 4.7 and 3.5 ms.
FEW_TOKENS = 16
# The same on a GPU, where arithmetic is cheaper. Up to this many tokens, matmuls run on kernels that read a weight once
# and fuse the ops around them, and a kernel program computes attention for one token. Above, the library's matmuls are
# faster, and attention computes blocks of tokens.
GPU_FEW_TOKENS = 64


# The feature of bucket classes in which a row has the same bits in every class and with any other rows in its step.
BATCH_INVARIANT = "batch-invariant"


def owed_features(*, deterministic: bool) -> tuple[str, ...]:
    """Return the `features` that the lowerings of all bucket classes must have."""
    return (BATCH_INVARIANT,) if deterministic else ()


class BucketClass(BaseModel):
    """The steps that one lowering serves.

    `tokens` bounds T, both ends inclusive. `q_max` bounds the tokens of one sequence in a step: 1 for pure decode, k
    for speculation, None for any. `features` names other things that the steps use or that the lowering must provide.
    """

    model_config = _FROZEN
    name: str
    tokens: tuple[int, int]
    q_max: int | None = None
    features: tuple[str, ...] = ()

    @property
    def few_tokens(self) -> bool:
        return self.tokens[1] <= FEW_TOKENS

    @property
    def batch_invariant(self) -> bool:
        return BATCH_INVARIANT in self.features

    def holds(self, tokens: int, q_max: int) -> bool:
        return self.tokens[0] <= tokens <= self.tokens[1] and (self.q_max is None or q_max <= self.q_max)


Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
# The text of a type in a plan: f32[pages, 2, 16, 2, 14], with strides after a semicolon.
_TYPE = re.compile(r"(\w+)\[([^\];]*)")


def shape_text(type_text: str) -> list[str]:
    """Return the sizes of a type, numbers and dims, without the parser, which imports torch."""
    found = _TYPE.match(type_text)
    return [size.strip() for size in found[2].split(",")] if found else []


class Executable(BaseModel):
    """Compiled code of a region: a backend's `emit` writes it and its `load` reads it. On a GPU, CUDA graphs capture
    its calls: its launches depend only on shapes, and the host reads nothing.

    `files` are relative to the executable's own folder. `workspace` is the peak allocation of one call in bytes,
    results included, in the largest step.
    """

    model_config = _FROZEN
    id: str
    backend: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: tuple[str, ...]
    workspace: Bytes = 0


class Ref(BaseModel):
    """A value, input, param or state by name."""

    model_config = _FROZEN
    ref: str


class DType(BaseModel):
    """A dtype among the arguments of an op, by its IR name."""

    model_config = _FROZEN
    dtype: str


Scalar = bool | int | float | str | None
Argument = Annotated[Ref | DType | Scalar | tuple[Scalar, ...], Field(union_mode="left_to_right")]


class Instruction(BaseModel):
    """One call. `target` is an op ("ingot.embedding") or an executable ("exe.<id>"). If an op has an `executable`, that
    was compiled for the types of this call and computes it; it takes the call's tensors in order.

    `results` names the call's results, getitems folded in ("" for an unused one). `updates` names the states that it
    updates in place instead of returning. `frees` names the values that nothing reads afterwards.
    """

    model_config = _FROZEN
    target: str
    backend: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument] = {}
    results: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    executable: str | None = None

    @property
    def calls(self) -> str | None:
        """Return the id of the executable that computes the call; None if a backend's own function does."""
        return self.target.removeprefix("exe.") if self.target.startswith("exe.") else self.executable


class Value(BaseModel):
    """A value between instructions.

    `buffer` is "pool" or "view". A pool value is allocated at its instruction, as a tensor of type `storage`, and freed
    after the last use of it and of its views. A view is part of the memory of `of`, another value, input, param or
    state.
    """

    model_config = _FROZEN
    type: str
    buffer: str
    storage: str | None = None
    of: str | None = None


class State(BaseModel):
    """A state that the runtime allocates: its kind, group and unit, and its type with load-time dims open."""

    model_config = _FROZEN
    kind: str
    group: str
    unit: str
    type: str


class BucketMemory(BaseModel):
    """The most memory that steps of one bucket class allocate, in bytes.

    `sizes` are the dims of the largest step. `activations` holds all live values and the allocation of the running
    call, at the instruction with index `peak`.
    """

    model_config = _FROZEN
    sizes: dict[str, int]
    activations: Bytes
    peak: Annotated[int, Field(ge=0)]


class GroupMemory(BaseModel):
    """The memory of a group of caches.

    page                bytes of a page in all caches of the group
    pages_per_sequence  the most pages that a sequence of full length holds between steps
    pages_per_step      the most further pages that a step writes, before the pages that it has read are freed
    """

    model_config = _FROZEN
    page: Bytes
    pages_per_sequence: Annotated[int, Field(ge=0)]
    pages_per_step: Annotated[int, Field(ge=0)] = 0


class ResidentMemory(BaseModel):
    """The memory that stays from step to step, in bytes.

    weights  all resident tensors, each once
    states   states by device row
    slot     a slot in all per-sequence states
    groups   groups of caches by name (`ingot.ir.cache.groups`)
    inputs   the inputs of the largest step
    outputs  the outputs of the largest step: those of the previous step are held during a step
    """

    model_config = _FROZEN
    weights: Bytes
    states: Bytes
    slot: Bytes = 0
    groups: dict[str, GroupMemory] = {}
    inputs: Bytes
    outputs: Bytes

    @property
    def page(self) -> int:
        """Return the bytes of one page of each group."""
        return sum(group.page for group in self.groups.values())


class BucketPlan(BaseModel):
    """The instructions of one bucket class, in order. Those before index `ending` are the forward segment, the rest are
    the ending's."""

    model_config = _FROZEN
    bucket: BucketClass
    instructions: tuple[Instruction, ...]
    values: dict[str, Value]
    memory: BucketMemory
    ending: Annotated[int, Field(ge=0)]

    def nodes_per_backend(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for instruction in self.instructions:
            counts[instruction.backend] = counts.get(instruction.backend, 0) + 1
        return counts


class Plan(BaseModel):
    """The plan of one entry. The executor has nothing left to decide.

    `ending` is the entry's ending as text (`ingot.ir.features.EndingUse`). `granule`: a step's tokens of a sequence
    must end at a multiple of it, or at the sequence's end, because that many positions see each other. `outputs` are
    the output types of each bucket class; the logits of a class may have a narrower dtype (`ir.outputs`). `executables`
    holds regions by id, `libraries` the kernel libraries by backend.
    """

    model_config = _FROZEN
    entry: str
    ending: str
    granule: Annotated[int, Field(ge=1)] = 1
    dims: dict[str, tuple[int, int]]
    inputs: dict[str, str]
    params: dict[str, str]
    states: dict[str, State]
    outputs: dict[str, str]
    executables: dict[str, Executable]
    libraries: dict[str, Executable] = {}
    memory: ResidentMemory
    buckets: tuple[BucketPlan, ...]

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class Plans(BaseModel):
    """The plans of one rank: one for every entry of a model, by the entry's name.

    Entries share params and states of the same name, and executables and libraries of the same id. `round` lists the
    entries that run in each step, in order, `main` first. Each takes its inputs from those of the step, and passes
    values to others in states.
    """

    model_config = _FROZEN
    plans: dict[str, Plan]
    round: tuple[str, ...] = ("main",)

    @property
    def states(self) -> dict[str, State]:
        """Return the states of all entries."""
        return {name: state for plan in self.plans.values() for name, state in plan.states.items()}

    @property
    def executables(self) -> dict[str, Executable]:
        """Return the executables of all entries, by id."""
        return {key: one for plan in self.plans.values() for key, one in plan.executables.items()}

    @property
    def libraries(self) -> dict[str, Executable]:
        """Return the libraries of all entries, by backend."""
        return {name: one for plan in self.plans.values() for name, one in plan.libraries.items()}

    def all_executables(self) -> tuple[Executable, ...]:
        """Return everything that was built: executables and libraries."""
        return (*self.executables.values(), *self.libraries.values())


PLAN_FILE = "plan.json"
# The position of all ranks of a mesh that run the same plans.
ALL = "all"


class PlanFile(BaseModel):
    """plan.json: the plans of each rank of a mesh.

    Ranks with the same plans share a position: on one device, and with tensor parallelism alone, all share "all".
    `positions` holds the plans by position. `ranks` is the position of each rank, in the order of `ir.mesh.ranks`.
    """

    model_config = _FROZEN
    positions: dict[str, Plans]
    ranks: tuple[str, ...]

    @staticmethod
    def alike(plans: Plans, mesh: Mesh) -> "PlanFile":
        """Return a file with the same plans for every rank of a mesh."""
        return PlanFile(positions={ALL: plans}, ranks=(ALL,) * world_size(mesh))

    def of(self, rank: int) -> Plans:
        """Return the plans of a rank by its index. Raises ArtifactError if the file has none for it."""
        position = self.ranks[rank] if rank < len(self.ranks) else None
        if position is None or position not in self.positions:
            found = f"its position '{position[:80]}' has none" if position is not None else "it has no position"
            raise ArtifactError(
                f"there are no plans for rank {rank}: {found}",
                where=PLAN_FILE,
                expected=f"the position of each rank, out of {', '.join(self.positions)[:200] or 'none'}",
                hint="compile the model again",
            )
        return self.positions[position]

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
