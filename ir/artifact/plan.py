"""What the runtime executes: instructions per bucket class, the values between them, the executables they call.

These types are also the schema of plan.json. Tensor types stand in their text form.
"""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import Mesh, world_size

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


# Steps of up to this many tokens read weights and compute little: kernels that read them once, and whose calls are
# cheap, beat compiled regions there. Measured with the bundled model on two cores with AVX-512, compiled with 1 and
# with 64 here: a decode step of 16 takes 2.4 ms on kernels and 2.9 ms on regions, one of 32 takes 4.7 and 3.5 ms.
FEW_TOKENS = 16
# The same on a GPU, where arithmetic is cheaper: up to here products are kernels that read a weight once and fuse what
# stands around them, and a token of attention is a program's business. Above, the library's products are ahead, and
# attention takes tokens in blocks.
GPU_FEW_TOKENS = 64


# The feature of bucket classes whose lowerings give a row the same bits in each of them, whatever is in its step.
BATCH_INVARIANT = "batch-invariant"


def owed_features(*, deterministic: bool) -> tuple[str, ...]:
    """What the lowerings of all bucket classes owe, as their `features`."""
    return (BATCH_INVARIANT,) if deterministic else ()


class BucketClass(BaseModel):
    """The steps that one lowering serves.

    `tokens` bounds T, both ends inclusive. `q_max` bounds the tokens of one sequence in a step: 1 for pure decode, k
    for speculation, None for any. `features` names what else the steps use, or what their lowering owes.
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
# A type as a plan writes it: f32[pages, 2, 16, 2, 14], and strides after a semicolon.
_TYPE = re.compile(r"(\w+)\[([^\];]*)")


def shape_text(type_text: str) -> list[str]:
    """The sizes of a type, numbers and dims, without parsing it: that needs torch."""
    found = _TYPE.match(type_text)
    return [size.strip() for size in found[2].split(",")] if found else []


class Executable(BaseModel):
    """Compiled code for a region: what a backend's `emit` leaves and its `load` takes. For a GPU, captured graphs hold
    its calls: what they launch follows from shapes alone, and nothing is read on the host.

    `files` are relative to the executable's own folder. `workspace` is what one call allocates
    at its peak in bytes, its results among it, in the largest step.
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
    """One call. `target` is an op ("ingot.embedding") or an executable ("exe.<id>"). An op with an `executable` is
    computed by that, which was compiled for the types of this call; it takes the call's tensors in order.

    `results` names what it yields, a getitem folded in ("" for a result that nothing uses). `updates` names the states
    that it updates in place instead of yielding. `frees` names the values that nothing reads afterwards.
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
        """The id of the executable that computes it; None where a backend's own function does."""
        return self.target.removeprefix("exe.") if self.target.startswith("exe.") else self.executable


class Value(BaseModel):
    """A value between instructions.

    `buffer` is "pool": allocated at its instruction, as a tensor of type `storage`, and given back after the last use
    of it and of its views; or "view": part of the memory of `of`, another value, input, param or state.
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
    """What the steps of one bucket class allocate at most, in bytes.

    `sizes` are the dims of the largest step. `activations` are all values alive and what a call takes beside them,
    at the instruction with the number `peak`.
    """

    model_config = _FROZEN
    sizes: dict[str, int]
    activations: Bytes
    peak: Annotated[int, Field(ge=0)]


class GroupMemory(BaseModel):
    """What a group of caches takes.

    page                bytes of a page in all caches of the group
    pages_per_sequence  pages that a sequence at full length holds between steps at most
    pages_per_step      pages that a step writes beside these at most, before those are given back that it has read
    """

    model_config = _FROZEN
    page: Bytes
    pages_per_sequence: Annotated[int, Field(ge=0)]
    pages_per_step: Annotated[int, Field(ge=0)] = 0


class ResidentMemory(BaseModel):
    """What stays from step to step, in bytes.

    weights  all resident tensors, each once
    states   states by device row
    slot     a slot, in all states that stand once per sequence
    groups   groups of caches by name (`ingot.ir.cache.groups`)
    inputs   the inputs of the largest step
    outputs  the outputs of the largest step: those of the step before are held while one runs
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
        """Bytes of one page of each group."""
        return sum(group.page for group in self.groups.values())


class BucketPlan(BaseModel):
    """The instructions of one bucket class, in order: those in front of the number `ending` are the forward segment,
    and from there on they are the ending's."""

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
    """The plan of one entry: what the executor needs, and nothing that it would have to decide.

    `ending` is that of the entry, as text (`ingot.ir.features.EndingUse`). `granule`: so many positions of a sequence
    see each other, and what a step feeds of it ends with a multiple, or with the sequence. `outputs` are the types of
    what each bucket class gives; logits of one may be of a narrower dtype (`ir.outputs`). `executables` are regions by
    id, `libraries` the kernels of op backends by backend.
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
    """What one rank runs: the plan of every entry of a model, by the entry's name.

    Entries share: params and states of one name are one tensor, executables and libraries of one id are loaded once.
    `round` names the entries that run in each step, in order, `main` first: each takes those of the step's inputs that
    it has, and leaves what others need of it in states.
    """

    model_config = _FROZEN
    plans: dict[str, Plan]
    round: tuple[str, ...] = ("main",)

    @property
    def states(self) -> dict[str, State]:
        """The states of all entries."""
        return {name: state for plan in self.plans.values() for name, state in plan.states.items()}

    @property
    def executables(self) -> dict[str, Executable]:
        """The executables of all entries, by id."""
        return {key: one for plan in self.plans.values() for key, one in plan.executables.items()}

    @property
    def libraries(self) -> dict[str, Executable]:
        """The libraries of all entries, by backend."""
        return {name: one for plan in self.plans.values() for name, one in plan.libraries.items()}

    def all_executables(self) -> tuple[Executable, ...]:
        """Everything that was built: executables of regions, and libraries."""
        return (*self.executables.values(), *self.libraries.values())


PLAN_FILE = "plan.json"
# The position of all ranks of a mesh, where they run the same plans.
ALL = "all"


class PlanFile(BaseModel):
    """plan.json: what each rank of a mesh runs.

    Ranks that run the same plans share a position: on one device, and with tensor parallelism alone, all share "all".
    `positions` are the plans by position. `ranks` is the position of each rank, in the order of `ir.mesh.ranks`.
    """

    model_config = _FROZEN
    positions: dict[str, Plans]
    ranks: tuple[str, ...]

    @staticmethod
    def alike(plans: Plans, mesh: Mesh) -> "PlanFile":
        """The same plans for every rank of a mesh."""
        return PlanFile(positions={ALL: plans}, ranks=(ALL,) * world_size(mesh))

    def of(self, rank: int) -> Plans:
        """The plans of a rank by its index. Raises ArtifactError where the file has none for it."""
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
