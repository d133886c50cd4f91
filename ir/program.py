"""A program: a typed graph over params, states and inputs, at one stage of the pipeline."""

import enum
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ingot.ir.artifact.plan import BucketClass, Executable, Plan
from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.features.feature import SAMPLED, EndingUse
from ingot.ir.ops import OPS, op_of
from ingot.ir.ops.aten import ATEN, definition_of
from ingot.ir.recipe import Recipe
from ingot.ir.types import Dim, Placement, Split, StateType, TensorType, ValueType

if TYPE_CHECKING:
    from ingot.ir.diff import ProgramDiff

# Results of these targets share memory with their first argument.
VIEWS = frozenset({operator.getitem, *(op.overload for op in ATEN.values() if op.view)})


class Stage(enum.IntEnum):
    """How far the pipeline has come. What a stage promises stands in `ingot.ir.verify`."""

    TRACED = 0
    NORMAL = 1
    QUANTIZED = 2
    SHARDED = 3
    CACHED = 4
    FUSED = 5
    LOWERED = 6
    PLANNED = 7


@dataclass(frozen=True)
class ParamSpec:
    """A weight: its type, and how it is made from the checkpoint.

    `split` says how a mesh would split it; None: every rank has it whole. On a mesh `placement` says where it lies
    instead.
    """

    type: TensorType
    recipe: Recipe
    placement: tuple[Placement, ...] = ()
    split: Split | None = None


@dataclass(frozen=True)
class StateSpec:
    """What lives on the device from step to step.

    `kind` says what it holds (paged_kv, row), `group` which states share one page table or row numbering, `unit`
    whether it grows per token or stands once per sequence.
    """

    kind: str
    group: str
    unit: str
    type: TensorType
    placement: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in ("token", "sequence"):
            raise VerifyError(f"unknown state unit '{self.unit}'", expected="token or sequence")


@dataclass(frozen=True)
class RegionCall:
    """The target of a node that stands for a region of the program."""

    name: str

    @property
    def __name__(self) -> str:  # what fx derives node names from
        return f"region_{self.name}"

    def __call__(self, *args: Any) -> Any:
        raise InternalError(f"region '{self.name}' was called outside an interpreter")


@dataclass
class Region:
    """A subgraph that a backend compiles as one. The lowered node keeps the body that it stands for."""

    name: str
    body: "Program"
    backend: str
    executable: Executable | None = None


@dataclass
class Program:
    """A typed graph. `params`, `states` and inputs are placeholders named by their keys; outputs are named. `ending`
    says what becomes of the outputs.

    `mesh` holds the sizes of its axes by name; empty for one device. On a mesh the types are those of one rank, and
    every tensor has a placement (`ingot.ir.infer_placement`).
    `libraries` holds the built kernels of the op backends that have any, by backend; `compiled` single calls that a
    backend compiles for their types, by the name in the call's meta "compiled": calls that differ in nothing but
    values share one. `history` holds the records of
    the passes that made it, in order.
    """

    name: str
    stage: Stage
    dims: dict[str, Dim]
    ending: EndingUse = SAMPLED
    graph: fx.Graph = field(default_factory=fx.Graph)
    params: dict[str, ParamSpec] = field(default_factory=dict)
    states: dict[str, StateSpec] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    mesh: dict[str, int] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    libraries: dict[str, Executable] = field(default_factory=dict)
    compiled: dict[str, Region] = field(default_factory=dict)
    bucket: BucketClass | None = None
    plan: Plan | None = None
    history: tuple[PassRecord, ...] = ()

    def add_input(self, name: str, value_type: TensorType) -> fx.Node:
        return self._placeholder(name, value_type, "input")

    def add_param(self, name: str, spec: ParamSpec) -> fx.Node:
        self.params[name] = spec
        return self._placeholder(name, spec.type, "param")

    def add_state(self, name: str, spec: StateSpec) -> fx.Node:
        self.states[name] = spec
        node = self._placeholder(name, StateType(name), "state")
        node.meta["holds"] = spec.type  # for backends, which see nodes and no program
        return node

    def remove_unused_params(self) -> None:
        for node in list(self.placeholders("param")):
            if not node.users:
                self.graph.erase_node(node)
                del self.params[str(node.target)]

    def _placeholder(self, name: str, value_type: ValueType, kind: str) -> fx.Node:
        last = None
        for node in self.placeholders():
            last = node
            if node.target == name:
                raise VerifyError(f"placeholder '{name}' is defined twice", where=f"program {self.name}")
        # Placeholders stay together in front.
        first = next(iter(self.graph.nodes), None)
        place = self.graph.inserting_before(first) if last is None else self.graph.inserting_after(last)
        with place:
            node = self.graph.create_node("placeholder", name, name=name.replace(".", "_"))
        node.meta.update(type=value_type, kind=kind)
        return node

    def set_outputs(self, values: Mapping[str, fx.Node]) -> None:
        """Name the results; replaces earlier ones."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.outputs = tuple(values)
        self.graph.output(tuple(values.values()))

    def placeholders(self, kind: str | None = None) -> Iterator[fx.Node]:
        for node in self.graph.nodes:
            if node.op != "placeholder":
                return  # they stand together in front
            if kind in (None, node.meta["kind"]):
                yield node

    def calls(self, target: Any = None) -> Iterator[fx.Node]:
        """Call nodes in order; those of one target when it is given."""
        for node in self.graph.nodes:
            if node.op == "call_function" and target in (None, node.target):
                yield node

    def find(self, name: str) -> fx.Node:
        """The placeholder `name`."""
        for node in self.placeholders():
            if node.target == name:
                return node
        raise VerifyError(f"program {self.name} has no input, param or state '{name}'")

    def input_types(self) -> dict[str, TensorType]:
        return {str(node.target): node.meta["type"] for node in self.placeholders("input")}

    def output_nodes(self) -> dict[str, fx.Node]:
        result = self.graph.output_node().args[0]
        assert isinstance(result, tuple)
        return dict(zip(self.outputs, result, strict=True))

    def symbols(self) -> frozenset[str]:
        """The dims that the types of its values and states name."""
        types = [node.meta["type"] for node in self.graph.nodes if node.op != "output"]
        types += [spec.type for spec in self.states.values()]
        tensors = [item for value_type in types for item in getattr(value_type, "items", (value_type,))]
        return frozenset(size for item in tensors for size in getattr(item, "shape", ()) if isinstance(size, str))

    def diff(self, other: "Program") -> "ProgramDiff":
        """What changes in meaning from this program to `other`; falsy when nothing does (`ingot.ir.diff`)."""
        from ingot.ir.diff import diff_programs  # which is about programs and imports this module

        return diff_programs(self, other)

    def copy(self) -> "Program":
        """An independent copy with the same node names; specs and region bodies, which are never edited, are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            # `node_copy` would look through all arguments for torch's symbols, which takes a third of a copy's time.
            new = mapping[node] = graph.create_node(node.op, node.target, name=node.name)
            new.args = fx.node.map_arg(node.args, mapping.__getitem__)
            new.kwargs = fx.node.map_arg(node.kwargs, mapping.__getitem__)
            new.meta = dict(node.meta)
        return Program(
            name=self.name,
            stage=self.stage,
            dims=dict(self.dims),
            ending=self.ending,
            graph=graph,
            params=dict(self.params),
            states=dict(self.states),
            outputs=self.outputs,
            mesh=dict(self.mesh),
            regions=dict(self.regions),
            libraries=dict(self.libraries),
            compiled=dict(self.compiled),
            bucket=self.bucket,
            plan=self.plan,
            history=self.history,
        )


def target_name(target: Any) -> str:
    """The printed name of a call target."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, RegionCall):
        return f"region.{target.name}"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "ingot":
            return f"ingot.{target._schema.name.partition('::')[2]}"
        return f"{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    raise InternalError(f"a graph calls {target!r}, which the IR has no name for")


def target_of(name: str) -> Any:
    """The inverse of `target_name`; None for an unknown name."""
    if name == "getitem":
        return operator.getitem
    if name.startswith("region."):
        return RegionCall(name.removeprefix("region."))
    if name.startswith("ingot.") and name.removeprefix("ingot.") in OPS:
        return OPS[name.removeprefix("ingot.")].overload
    return ATEN[name].overload if name in ATEN else None


def op_counts(program: Program) -> dict[str, int]:
    """How often each target is called, most frequent first."""
    counts: dict[str, int] = {}
    for node in program.calls():
        name = "region" if isinstance(node.target, RegionCall) else target_name(node.target)
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class ModelSpec:
    """What a config.json says of a model, in one vocabulary for all architectures; no weights.

    `dims` is the definition's own frozen description (of a decoder `ingot.models.blocks.decoder.DecoderSpec`). `config`
    holds the fields of the config.json that were looked at, as they stand there.
    """

    architecture: str
    family: str
    dtype: torch.dtype
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dims: Any
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # spellings differ


@dataclass
class Model:
    """A traced model: programs by entry name (`main`; others as verify, draft, encode) over shared params and states.

    What has one name in two entries is one thing. `expected` holds, by entry, the number of matches that each pass owes
    it, by formula from the model's layers and flags. `round` names the entries that run in each step, in order.
    `respelled` holds the checkpoint's names of tensors by the definition's, where they differ.
    """

    spec: ModelSpec
    entries: dict[str, Program]
    expected: Mapping[str, Mapping[str, int]]
    round: tuple[str, ...] = ("main",)
    respelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, ParamSpec]:
        """The params of all entries. Raises VerifyError when one name has two specs."""
        return merged_params(self.entries.values())


def merged_params(programs: Iterable[Program]) -> dict[str, ParamSpec]:
    """The params of several programs by name. Raises VerifyError when one name has two specs."""
    merged: dict[str, ParamSpec] = {}
    for program in programs:
        for name, spec in program.params.items():
            if merged.setdefault(name, spec) != spec:
                raise VerifyError(
                    f"the param '{name}' is {spec.type} by {spec.recipe}",
                    where=f"program {program.name}",
                    expected=f"{merged[name].type} by {merged[name].recipe}, as in the other entries",
                )
    return merged


def tensor_type(node: fx.Node) -> TensorType:
    """The type of a node that must be a tensor."""
    value_type = node.meta["type"]
    if not isinstance(value_type, TensorType):
        raise VerifyError(f"%{node.name} is no tensor but {value_type}")
    return value_type


def held_type(node: fx.Node) -> TensorType:
    """The type of a tensor; of a version of a state, that of what the state holds."""
    value_type = node.meta["type"]
    if not isinstance(value_type, StateType):
        return tensor_type(node)
    named = (one for one in node.graph.nodes if one.op == "placeholder" and one.target == value_type.name)
    held = next(named).meta["holds"]
    assert isinstance(held, TensorType)
    return held


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the parameters of its op, in their order and with defaults filled in. A region and
    `getitem` have no parameters: their arguments go by their places, "0", "1". Raises VerifyError for a call that does
    not fit its op."""
    op = definition_of(node.target)
    if op is None:
        return {str(place): value for place, value in enumerate(node.args)}
    try:
        return op.bind(node.args, node.kwargs)
    except TypeError as error:
        raise VerifyError(f"%{node.name} is no call of {target_name(node.target)}: {error}") from None


def named_values(node: fx.Node) -> dict[str, fx.Node]:
    """Those of `named_arguments` that are values of the program."""
    return {name: value for name, value in named_arguments(node).items() if isinstance(value, fx.Node)}


def states_written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The versions of states that a call overwrites, in the order in which it gives the next ones."""
    op = op_of(node.target)
    if op is None or not op.states:
        return ()
    named = named_values(node)
    return tuple(named[name] for name in op.states)


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == target
