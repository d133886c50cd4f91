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
    """The stages that a program passes through from tracing to its plan. `ingot.ir.verify` checks their rules."""

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
    """A weight of a program: its type, and the recipe that makes it from the checkpoint.

    `split` says how a mesh of devices would divide the weight; None: every rank holds all of it. In a program on a
    mesh, `placement` says how it is divided, and `split` is None.
    """

    type: TensorType
    recipe: Recipe
    placement: tuple[Placement, ...] = ()
    split: Split | None = None


@dataclass(frozen=True)
class StateSpec:
    """A state of a program: a tensor that stays on the device from step to step, such as a KV cache.

    `kind` names the contents ("paged_kv", "row"). States of one `group` use the same page numbers or row numbers.
    `unit` is "token" for a state that grows with each token, and "sequence" for a state of fixed size per sequence.
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
    """The call target of an fx node that calls a region (calls that are compiled together). `name` names the region."""

    name: str

    @property
    def __name__(self) -> str:  # fx derives node names from it
        return f"region_{self.name}"

    def __call__(self, *args: Any) -> Any:
        raise InternalError(f"region '{self.name}' was called outside an interpreter")


@dataclass
class Region:
    """Several calls that a backend compiles together, to one executable.

    `body` is a program of these calls. In the main program a single node with the target `RegionCall` replaces them.
    `executable` is the compiled code; None until it exists.
    """

    name: str
    body: "Program"
    backend: str
    executable: Executable | None = None


@dataclass
class Program:
    """An fx graph of op calls with typed values, at one stage of the pipeline.

    Inputs, params and states are placeholders in the graph, with the names that `params` and `states` have as keys.
    `outputs` names the results. `dims` maps symbols in shapes, such as "T", to their bounds. `ending` says how the
    runtime uses the outputs, for example that it samples tokens. `mesh` maps axes of devices to their sizes; empty for
    one device. On a mesh, types are those of one rank, and every tensor has a placement. `bucket` is the bucket class
    (range of step sizes) that the program serves; `plan` holds its instructions. Both are None before lowering makes
    them.

    `libraries` maps a backend's name to its kernel library. `compiled` holds single calls that a backend compiles for
    their types, keyed by the node's meta "compiled"; calls of equal types share one. `history` holds one record per
    pass that ran on the program, in order.
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
        node.meta["holds"] = spec.type  # backends see the node, not the program
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
        # Placeholders come first in the graph.
        first = next(iter(self.graph.nodes), None)
        place = self.graph.inserting_before(first) if last is None else self.graph.inserting_after(last)
        with place:
            node = self.graph.create_node("placeholder", name, name=name.replace(".", "_"))
        node.meta.update(type=value_type, kind=kind)
        return node

    def set_outputs(self, values: Mapping[str, fx.Node]) -> None:
        """Make the program return these nodes under these names, in place of its outputs so far."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.outputs = tuple(values)
        self.graph.output(tuple(values.values()))

    def placeholders(self, kind: str | None = None) -> Iterator[fx.Node]:
        for node in self.graph.nodes:
            if node.op != "placeholder":
                return  # placeholders come first in the graph
            if kind in (None, node.meta["kind"]):
                yield node

    def calls(self, target: Any = None) -> Iterator[fx.Node]:
        """Yield the nodes that are calls, in order; with `target`, only the calls of this op or region."""
        for node in self.graph.nodes:
            if node.op == "call_function" and target in (None, node.target):
                yield node

    def find(self, name: str) -> fx.Node:
        """Return the placeholder node of the input, param or state `name`. Raises VerifyError if there is none."""
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
        """Return the symbols, such as "T", that occur in the shapes of values and states."""
        types = [node.meta["type"] for node in self.graph.nodes if node.op != "output"]
        types += [spec.type for spec in self.states.values()]
        tensors = [item for value_type in types for item in getattr(value_type, "items", (value_type,))]
        return frozenset(size for item in tensors for size in getattr(item, "shape", ()) if isinstance(size, str))

    def diff(self, other: "Program") -> "ProgramDiff":
        """Return the differences between this program and `other` in what they compute, whatever their names and order.

        The result is false in a condition if there are no differences: `if not one.diff(other)`.
        """
        from ingot.ir.diff import diff_programs  # here, because that module imports this one

        return diff_programs(self, other)

    def copy(self) -> "Program":
        """Return a copy of the program with a graph of its own and the same node names.

        The copy shares the specs of params and states, and the bodies of regions, which are never edited.
        """
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            # `node_copy` would search all arguments for torch's symbols, which takes a third of a copy's time.
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
    """Return the name of a call target in a program's text, such as "ingot.linear" or "region.r3"."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, RegionCall):
        return f"region.{target.name}"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "ingot":
            return f"ingot.{target._schema.name.partition('::')[2]}"
        return f"{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    raise InternalError(f"a graph calls {target!r}, which has no name in the IR")


def target_of(name: str) -> Any:
    """Return the call target for a name in a program's text, such as "ingot.linear"; None if no op has it."""
    if name == "getitem":
        return operator.getitem
    if name.startswith("region."):
        return RegionCall(name.removeprefix("region."))
    if name.startswith("ingot.") and name.removeprefix("ingot.") in OPS:
        return OPS[name.removeprefix("ingot.")].overload
    return ATEN[name].overload if name in ATEN else None


def op_counts(program: Program) -> dict[str, int]:
    """Return the number of calls of each op, by printed name, most frequent first. "region" counts all region calls."""
    counts: dict[str, int] = {}
    for node in program.calls():
        name = "region" if isinstance(node.target, RegionCall) else target_name(node.target)
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class ModelSpec:
    """A model as its config.json describes it, with the same field names for all architectures; no weights.

    `dims` describes the layers, as an object of a frozen class that the architecture defines
    (`ingot.models.blocks.decoder.DecoderSpec` for a decoder). `config` holds the config.json fields that were read,
    unchanged.
    """

    architecture: str
    family: str
    dtype: torch.dtype
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dims: Any
    # Not compared: checkpoints spell one setting in several ways.
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass
class Model:
    """A traced model: one program per entry (`main`; also verify, draft, encode) over shared params and states.

    `entries` maps names to programs; their params and states of the same name are the same tensor. `round` lists the
    entries that run in each step, in order. `expected[entry][pass]` is the number of matches that the pass must find,
    computed from the model's layers and flags. `respelled` maps names of tensors in the model definition to their names
    in the checkpoint, if these differ.
    """

    spec: ModelSpec
    entries: dict[str, Program]
    expected: Mapping[str, Mapping[str, int]]
    round: tuple[str, ...] = ("main",)
    respelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, ParamSpec]:
        """Return the params of all entries (programs) by name.

        Raises VerifyError if two entries define one name differently.
        """
        return merged_params(self.entries.values())


def merged_params(programs: Iterable[Program]) -> dict[str, ParamSpec]:
    """Return the params of several programs by name. Raises VerifyError if two programs define one name differently."""
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
    """Return the type of a node's value. Raises VerifyError if it is a state or a tuple and not a tensor."""
    value_type = node.meta["type"]
    if not isinstance(value_type, TensorType):
        raise VerifyError(f"%{node.name} is not a tensor but {value_type}")
    return value_type


def held_type(node: fx.Node) -> TensorType:
    """Return the type of a node's tensor. For a state, that is the type of the tensor that the state holds.

    Raises VerifyError for a tuple.
    """
    value_type = node.meta["type"]
    if not isinstance(value_type, StateType):
        return tensor_type(node)
    named = (one for one in node.graph.nodes if one.op == "placeholder" and one.target == value_type.name)
    held = next(named).meta["holds"]
    assert isinstance(held, TensorType)
    return held


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, in the op's order, with defaults filled in.

    Regions and `getitem` have no named parameters: the keys are then "0", "1", and so on. Raises VerifyError if the
    arguments do not fit the op's signature.
    """
    op = definition_of(node.target)
    if op is None:
        return {str(place): value for place, value in enumerate(node.args)}
    try:
        return op.bind(node.args, node.kwargs)
    except TypeError as error:
        raise VerifyError(f"%{node.name} does not fit {target_name(node.target)}: {error}") from None


def named_values(node: fx.Node) -> dict[str, fx.Node]:
    """Return the arguments of a call that are nodes and not constants, by parameter name.

    Raises VerifyError if the arguments do not fit the op's signature.
    """
    return {name: value for name, value in named_arguments(node).items() if isinstance(value, fx.Node)}


def states_written(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments of a call that are states it overwrites; empty if it writes none.

    Their order is that in which the call returns the new versions.
    """
    op = op_of(node.target)
    if op is None or not op.states:
        return ()
    named = named_values(node)
    return tuple(named[name] for name in op.states)


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == target
