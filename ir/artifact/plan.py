"""The plan that the runtime executes: instructions per bucket class, the values between them, and executables.

These types are also the schema of plan.json. Tensor types are in their text form.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import Mesh, ranks, world_size

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


# Steps of up to this many tokens are bound by reading weights. Kernels that read weights once, with cheap calls, beat
# compiled regions there. Measured with the bundled model on two cores with AVX-512, compiled with limits of 1 and of
# 64: a decode step of 16 takes 2.4 ms on kernels and 2.9 ms on regions, one of 32 takes 4.7 and 3.5 ms.
FEW_TOKENS = 16
# The limit on a GPU, where arithmetic is cheaper. Up to it, matmuls run on kernels that read a weight once
# and fuse the ops around them, and a kernel program computes attention for one token. Above, the library's matmuls are
# faster, and attention computes blocks of tokens.
GPU_FEW_TOKENS = 64


# The backends that compute an op by its reference: on a whole batch, and row by row.
REFERENCES = ("reference", "rowwise")
# The feature of bucket classes that compute a row of a step with the same bits, whatever the class and the other rows.
BATCH_INVARIANT = "batch-invariant"


def owed_features(*, deterministic: bool) -> tuple[str, ...]:
    """Return the features that all compiled code of an artifact must have.

    They are ("batch-invariant",) for a deterministic artifact, else (). Code is compiled for each bucket class, which
    is a range of step sizes.
    """
    return (BATCH_INVARIANT,) if deterministic else ()


class BucketClass(BaseModel):
    """A range of step sizes for which the program is compiled once, such as "decode" for steps of up to 16 tokens.

    name      its name
    tokens    (fewest, most) tokens of a step
    q_max     the most tokens of a sequence in a step: 1 for plain decode, more for speculative decoding; None: no limit
    features  further properties of the compiled code; "batch-invariant": a row's bits do not depend on other rows
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
    """Return the sizes in the text of a tensor type, such as ["T", "64"] for "f32[T, 64]".

    Returns [] for other text. Unlike the parser of types, it does not import torch.
    """
    found = _TYPE.match(type_text)
    return [size.strip() for size in found[2].split(",")] if found else []


class Executable(BaseModel):
    """The compiled code of a call, of a region (calls that are compiled together), or of a kernel library.

    A backend's `emit` writes it, and its `load` loads it.

    id         identifies the code
    backend    the backend's name
    inputs     the types of its inputs, as text
    outputs    the types of its results, as text
    files      its files, relative to its folder
    workspace  the most bytes that one call allocates in the largest step, results included

    On a GPU, a CUDA graph can capture its calls: launches depend only on shapes, and the host reads no result.
    """

    model_config = _FROZEN
    id: str
    backend: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: tuple[str, ...]
    workspace: Bytes = 0


class Ref(BaseModel):
    """An argument of an instruction that is a tensor: the name of a value, input, param or state of the plan."""

    model_config = _FROZEN
    ref: str


class DType(BaseModel):
    """An argument of an instruction that is a dtype, such as "bf16"."""

    model_config = _FROZEN
    dtype: str


Scalar = bool | int | float | str | None
Argument = Annotated[Ref | DType | Scalar | tuple[Scalar, ...], Field(union_mode="left_to_right")]


class Instruction(BaseModel):
    """One call that the runtime runs.

    target      an op ("ingot.embedding") or an executable ("exe.<id>")
    backend     the backend that computes it
    args        its positional arguments
    kwargs      its keyword arguments
    results     the name of each result; "" for an unused one
    updates     the names of the states that it updates in place
    frees       the names of the values that no later instruction reads
    executable  for an op: the id of code that was compiled for this call's types, which gets the call's tensors in
                order; None if a function of the backend computes it
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
        """Return the id of the executable that computes the instruction.

        None if a function of the backend computes it.
        """
        return self.target.removeprefix("exe.") if self.target.startswith("exe.") else self.executable


class Value(BaseModel):
    """The memory of a value that an instruction makes and later instructions read.

    type     its type as text
    buffer   "pool" if it has memory from the pool, "view" if it shares the memory of another value, "received" if
             another pipeline stage sends it
    storage  in the pool: the type of the tensor that is allocated before the instruction; it is freed after the last
             use of the value and of its views
    of       for a view: the value, input, param or state that it is a view of
    """

    model_config = _FROZEN
    type: str
    buffer: str
    storage: str | None = None
    of: str | None = None


class State(BaseModel):
    """A state, such as a KV cache, that the runtime allocates when it loads the plan.

    kind   names its contents, such as "paged_kv" or "row"
    group  states of one group use the same page or row numbers
    unit   "token" if it grows with each token, "sequence" or "adapter" if each of these takes a fixed size
    type   its tensor type as text; symbols such as `pages` get their sizes at loading
    """

    model_config = _FROZEN
    kind: str
    group: str
    unit: str
    type: str


class Transfer(BaseModel):
    """A value that two pipeline stages share: one computes and sends it, the other receives it.

    name   the value's name in the plans of both
    stage  the index of the other stage
    """

    model_config = _FROZEN
    name: str
    stage: Annotated[int, Field(ge=0)]


class Transfers(BaseModel):
    """The values that the plan of a pipeline stage receives and sends, in order.

    received  before the model's instructions from earlier stages, and before those of the ending from later ones
    sent      after the model's instructions to later stages, and after those of the ending to earlier ones
    """

    model_config = _FROZEN
    received: tuple[Transfer, ...] = ()
    sent: tuple[Transfer, ...] = ()


class BucketMemory(BaseModel):
    """The most memory that a step of one bucket class (range of step sizes) allocates.

    sizes        the sizes of symbols such as "T" in the largest step
    activations  the peak in bytes: all live values, and what the running call allocates
    peak         the index of the instruction that reaches the peak
    """

    model_config = _FROZEN
    sizes: dict[str, int]
    activations: Bytes
    peak: Annotated[int, Field(ge=0)]


class GroupMemory(BaseModel):
    """The memory of a KV cache group: caches that keep the same tokens and share page numbers.

    page                bytes of a page in all caches of the group
    pages_per_sequence  the most pages that a sequence of full length holds between steps
    pages_per_step      the most additional pages that a step needs, because it frees old pages only at its end
    """

    model_config = _FROZEN
    page: Bytes
    pages_per_sequence: Annotated[int, Field(ge=0)]
    pages_per_step: Annotated[int, Field(ge=0)] = 0


class ResidentMemory(BaseModel):
    """The memory that a plan keeps between steps, in bytes.

    weights  all weights, each once
    states   the states with a row per running sequence, such as the last token
    slot     the recurrent states of one sequence, such as those of convolutions
    groups   the memory of each KV cache group, by name
    inputs   the inputs of the largest step
    outputs  the outputs of the largest step; they are kept while the next step runs
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
        """Return the bytes of one page of each KV cache group, added up."""
        return sum(group.page for group in self.groups.values())


class BucketPlan(BaseModel):
    """The instructions for steps of one bucket class, which is a range of step sizes.

    bucket        the bucket class
    instructions  all instructions, in order
    values        the values that instructions pass on to later ones, by name
    memory        the most memory that a step allocates
    ending        the index of the first instruction after the model; from there on, instructions use logits or hidden
                  states, for example to sample tokens, and may run later
    transfers     the values that a pipeline stage receives and sends; None if the plan is not that of a stage
    """

    model_config = _FROZEN
    bucket: BucketClass
    instructions: tuple[Instruction, ...]
    values: dict[str, Value]
    memory: BucketMemory
    ending: Annotated[int, Field(ge=0)]
    transfers: Transfers | None = None

    def nodes_per_backend(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for instruction in self.instructions:
            counts[instruction.backend] = counts.get(instruction.backend, 0) + 1
        return counts


class Plan(BaseModel):
    """All that the executor needs to run one entry, which is a program of a model.

    entry        the entry's name
    ending       what is done with the outputs, as text such as "sample"
    granule      the number of positions that all see each other in attention, such as 32 for blocks of 32; 1 for causal
                 masks. A step must process a sequence up to a multiple of it, or up to the sequence's end
    dims         (least, most) sizes of symbols, by symbol such as "T"
    inputs, params, outputs
                 their types as text, by name; in a bucket class, logits may have a narrower dtype
    states       the states by name
    executables  the compiled code, by id
    libraries    the kernel libraries, by backend
    memory       the memory that is kept between steps
    buckets      the instructions for each range of step sizes
    stage        (index, number) of the pipeline stage whose plan this is; None: the plan computes all of the entry
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
    stage: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class Plans(BaseModel):
    """The plans that one rank runs: one per entry. An entry is a program of a model.

    `plans` holds the plans by entry name. A param or state name means one tensor in all entries. The id of an
    executable means one executable in all entries. `round` names the entries that run in each step, in order, such as
    ("main", "draft"). Each entry reads the inputs of the step that it needs. Entries pass values to each other in
    states.
    """

    model_config = _FROZEN
    plans: dict[str, Plan]
    round: tuple[str, ...] = ("main",)

    @property
    def states(self) -> dict[str, State]:
        """Return the states of all entries (programs of a model), by name."""
        return {name: state for plan in self.plans.values() for name, state in plan.states.items()}

    @property
    def executables(self) -> dict[str, Executable]:
        """Return the executables of all entries (programs of a model), by id."""
        return {key: one for plan in self.plans.values() for key, one in plan.executables.items()}

    @property
    def libraries(self) -> dict[str, Executable]:
        """Return the kernel libraries of all entries (programs of a model), by backend."""
        return {name: one for plan in self.plans.values() for name, one in plan.libraries.items()}

    def all_executables(self) -> tuple[Executable, ...]:
        """Return all executables and kernel libraries of all entries (programs of a model)."""
        return (*self.executables.values(), *self.libraries.values())


PLAN_FILE = "plan.json"
# The key in `PlanFile.positions` if all ranks of a mesh run the same plans.
ALL = "all"


class PlanFile(BaseModel):
    """The contents of plan.json: the plans of each rank of a mesh.

    `positions` holds plans by a key. `ranks[i]` is the key of the plans that rank i runs, so that ranks with equal
    plans share them. On one device, and with tensor parallelism alone, all ranks have the key "all". Otherwise the
    ranks of a pipeline stage share a key, such as "stage 1".
    """

    model_config = _FROZEN
    positions: dict[str, Plans]
    ranks: tuple[str, ...]

    @staticmethod
    def alike(plans: Plans, mesh: Mesh) -> "PlanFile":
        """Return a plan.json in which all ranks of a mesh have the same plans."""
        return PlanFile(positions={ALL: plans}, ranks=(ALL,) * world_size(mesh))

    @staticmethod
    def staged(stages: Sequence[Plans], mesh: Mesh) -> "PlanFile":
        """Return a plan.json with the plans of each pipeline stage. `mesh` has as many stages."""
        names = [f"stage {index}" for index in range(len(stages))]
        return PlanFile(
            positions=dict(zip(names, stages, strict=True)), ranks=tuple(names[rank.stage] for rank in ranks(mesh))
        )

    def of(self, rank: int) -> Plans:
        """Return the plans of the rank with index `rank`. Raises ArtifactError if there are none for it."""
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
