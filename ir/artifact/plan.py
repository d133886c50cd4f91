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
# The limit on a GPU, where arithmetic is cheaper. Up to it, matmuls run on kernels that read a weight once
# and fuse the ops around them, and a kernel program computes attention for one token. Above, the library's matmuls are
# faster, and attention computes blocks of tokens.
GPU_FEW_TOKENS = 64


# The feature of bucket classes that compute a row of a step with the same bits, whatever the class and the other rows.
BATCH_INVARIANT = "batch-invariant"


def owed_features(*, deterministic: bool) -> tuple[str, ...]:
    """Return the features that the lowering of every bucket class (range of step sizes) must provide.

    That is ("batch-invariant",) for a deterministic artifact, else ().
    """
    return (BATCH_INVARIANT,) if deterministic else ()


class BucketClass(BaseModel):
    """A range of step sizes that share one lowering of the program, such as "decode" for steps of up to 16 tokens.

    `tokens` holds the fewest and the most tokens of a step. `q_max` is the most tokens of one sequence in a step: 1 for
    plain decode, more for speculative decoding, None for no limit. `features` names what the lowering must also
    provide, such as "batch-invariant" (a row's bits do not depend on the other rows).
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
    """Return the sizes in the text of a tensor type, numbers and symbols: ["T", "64"] for "f32[T, 64]".

    Returns [] if the text is not of a tensor type. Unlike the parser, this does not import torch.
    """
    found = _TYPE.match(type_text)
    return [size.strip() for size in found[2].split(",")] if found else []


class Executable(BaseModel):
    """The compiled code of a region or call: a backend's `emit` writes its files, and its `load` reads them.

    `id` identifies the code. `inputs` and `outputs` are types as text. `files` are relative to the executable's own
    folder. `workspace` is the most bytes that one call allocates in the largest step, results included. On a GPU, a
    CUDA graph can capture calls: launches depend only on shapes, and the host reads no result.
    """

    model_config = _FROZEN
    id: str
    backend: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: tuple[str, ...]
    workspace: Bytes = 0


class Ref(BaseModel):
    """An argument of an instruction that names a tensor: a value, input, param or state of the plan."""

    model_config = _FROZEN
    ref: str


class DType(BaseModel):
    """An argument of an instruction that is a dtype, by its name in programs, such as "bf16"."""

    model_config = _FROZEN
    dtype: str


Scalar = bool | int | float | str | None
Argument = Annotated[Ref | DType | Scalar | tuple[Scalar, ...], Field(union_mode="left_to_right")]


class Instruction(BaseModel):
    """One call that the runtime executes.

    `target` is an op ("ingot.embedding") or an executable ("exe.<id>"). For an op, `executable` may be the id of code
    that was compiled for the types of this call; that code then gets the call's tensors, in order. `results` names each
    result of the call, "" for an unused one. `updates` names the states that the call updates in place. `frees` names
    the values that no later instruction reads.
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
        """Return the id of the executable that computes the instruction; None if the backend has a function for it."""
        return self.target.removeprefix("exe.") if self.target.startswith("exe.") else self.executable


class Value(BaseModel):
    """The memory of a value that one instruction makes and later ones read.

    `type` is its type as text. `buffer` is "pool" or "view". A value in the pool is allocated before its instruction,
    as a tensor of type `storage`, and freed after the last use of it and of its views. A view shares the memory of
    `of`: another value, or an input, param or state.
    """

    model_config = _FROZEN
    type: str
    buffer: str
    storage: str | None = None
    of: str | None = None


class State(BaseModel):
    """A state, such as a KV cache, that the runtime allocates when it loads the plan.

    `kind` names its contents ("paged_kv", "row"). States of one `group` use the same page or row numbers. `unit` is
    "token" if it grows with each token, else "sequence". `type` is a tensor type as text; symbols such as `pages` get
    their size at loading.
    """

    model_config = _FROZEN
    kind: str
    group: str
    unit: str
    type: str


class BucketMemory(BaseModel):
    """The most memory that a step of one bucket class (range of step sizes) allocates.

    `sizes` maps symbols such as "T" to their sizes in the largest step. `activations` is the peak in bytes: all live
    values, and what the running call allocates. It is reached at the instruction with index `peak`.
    """

    model_config = _FROZEN
    sizes: dict[str, int]
    activations: Bytes
    peak: Annotated[int, Field(ge=0)]


class GroupMemory(BaseModel):
    """The memory of a group of KV caches, which use the same page numbers.

    page                bytes of a page in all caches of the group
    pages_per_sequence  the most pages that a sequence of full length holds between steps
    pages_per_step      the most pages that a step needs in addition, because it frees old pages only at its end
    """

    model_config = _FROZEN
    page: Bytes
    pages_per_sequence: Annotated[int, Field(ge=0)]
    pages_per_step: Annotated[int, Field(ge=0)] = 0


class ResidentMemory(BaseModel):
    """The memory that a plan keeps from step to step, in bytes.

    weights  all weights, each once
    states   the states with a row per running sequence, such as the last token
    slot     the state of one sequence in layers with a recurrent state, such as convolutions, added up
    groups   the groups of KV caches by name
    inputs   the inputs of the largest step
    outputs  the outputs of the largest step, because the outputs of the previous step are kept during a step
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
        """Return the bytes of one page in every group of KV caches, added up."""
        return sum(group.page for group in self.groups.values())


class BucketPlan(BaseModel):
    """The instructions for the steps of one bucket class (range of step sizes), in order.

    The instructions before index `ending` run the model and compute logits or hidden states. The others use these, for
    example to sample tokens, and may run later. `values` maps names to the values that instructions pass on to later
    ones.
    """

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
    """All that the executor needs to run one entry (program of a model): instructions, types and memory.

    `ending` says as text how the outputs are used, such as "sample". `granule` is 1 for causal masks, else the number
    of positions that see each other, such as 32 for blocks of 32. A step's tokens of a sequence must end at a multiple
    of it, or at the sequence's end. `dims` maps symbols such as "T" to (least, most). `inputs`, `params` and `outputs`
    map names to types as text; in a bucket class, logits may have a narrower dtype. `executables` maps ids to compiled
    code, `libraries` maps backends to their kernel libraries.
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
    """The plans that one rank runs: `plans` maps the name of each entry (program of a model) to its plan.

    Entries share params and states of the same name, and executables and libraries of the same id. `round` names the
    entries that run in each step, in order, such as ("main", "draft"). Each entry takes its inputs from those of the
    step. Entries pass values to each other in states.
    """

    model_config = _FROZEN
    plans: dict[str, Plan]
    round: tuple[str, ...] = ("main",)

    @property
    def states(self) -> dict[str, State]:
        """Return the states of all entries (programs of the model) by name."""
        return {name: state for plan in self.plans.values() for name, state in plan.states.items()}

    @property
    def executables(self) -> dict[str, Executable]:
        """Return the executables of all entries (programs of the model) by id."""
        return {key: one for plan in self.plans.values() for key, one in plan.executables.items()}

    @property
    def libraries(self) -> dict[str, Executable]:
        """Return the kernel libraries of all entries (programs of the model) by backend."""
        return {name: one for plan in self.plans.values() for name, one in plan.libraries.items()}

    def all_executables(self) -> tuple[Executable, ...]:
        """Return all compiled code of all entries (programs of the model).

        This is the code of regions and calls, and the kernel libraries.
        """
        return (*self.executables.values(), *self.libraries.values())


PLAN_FILE = "plan.json"
# The key in `PlanFile.positions` if all ranks of a mesh run the same plans.
ALL = "all"


class PlanFile(BaseModel):
    """The contents of plan.json: the plans of every rank of a mesh.

    `ranks[i]` is the key in `positions` of the plans that rank i runs, so ranks with equal plans share them. On one
    device, and with tensor parallelism alone, all ranks have the key "all".
    """

    model_config = _FROZEN
    positions: dict[str, Plans]
    ranks: tuple[str, ...]

    @staticmethod
    def alike(plans: Plans, mesh: Mesh) -> "PlanFile":
        """Return the contents of a plan.json in which every rank of a mesh has the same plans."""
        return PlanFile(positions={ALL: plans}, ranks=(ALL,) * world_size(mesh))

    def of(self, rank: int) -> Plans:
        """Return the plans of the rank with the index `rank`. Raises ArtifactError if the file has none for it."""
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
