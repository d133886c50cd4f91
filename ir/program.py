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
    """The stages of a program in the pipeline, from tracing to its plan. `ingot.ir.verify` has the rules of each."""

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
    """A weight of a program: its type, and the recipe that makes it from checkpoint tensors.

    `split` says how a mesh of devices may split the weight. None: every device holds all of it. `placement` says how a
    mesh does split it. A program on a mesh has only placements, and other programs have only splits.
    """

    type: TensorType
    recipe: Recipe
    placement: tuple[Placement, ...] = ()
    split: Split | None = None


@dataclass(frozen=True)
class StateSpec:
    """A state of a program: a tensor that stays on the device between steps, such as a KV cache.

    `kind` names the contents, such as "paged_kv" or "row". States of one `group` share their page or row numbers.
    `unit` is "token" if the state grows with each token. It is "sequence" if each sequence takes a fixed size, and
    "adapter" if each LoRA adapter does.
    """

    kind: str
    group: str
    unit: str
    type: TensorType
    placement: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in ("token", "sequence", "adapter"):
            raise VerifyError(f"unknown state unit '{self.unit}'", expected="token, sequence or adapter")


@dataclass(frozen=True)
class RegionCall:
    """The target of an fx node that calls a region, which is a set of calls compiled together.

    `name` names the region.
    """

    name: str

    @property
    def __name__(self) -> str:  # fx derives node names from it
        return f"region_{self.name}"

    def __call__(self, *args: Any) -> Any:
        raise InternalError(f"region '{self.name}' was called outside an interpreter")


@dataclass
class Region:
    """A set of calls that a backend compiles together to one executable.

    `body` is a program of these calls. One node with the target `RegionCall` replaces them in the main program.
    `executable` is the compiled code; None until it is compiled.
    """

    name: str
    body: "Program"
    backend: str
    executable: Executable | None = None


@dataclass
class Program:
    """An fx graph of op calls with typed values, at one stage of the pipeline.

    Inputs, params and states are placeholders in the graph. These fields exist from the start:

    dims       the bounds of each symbol in shapes, such as "T"
    ending     what the runtime does with the outputs, such as sampling tokens
    params     the specs of the weights, by placeholder name
    states     the specs of tensors that stay on the device between steps, by placeholder name
    outputs    the names of the results
    mesh       the size of each mesh axis; empty for one device; on a mesh, all types are those of one rank
    history    a record of each pass that ran on the program, in order

    Lowering adds these:

    bucket     the bucket class: the range of step sizes that the program serves
    plan       the instructions that the runtime runs
    stages     the plan of each pipeline stage; empty if there is only one
    regions    sets of calls that are compiled together, by name
    libraries  the kernel library of each backend, by backend name
    compiled   calls that are compiled alone, by the node's meta "compiled"; calls of equal types share an item
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
    stages: tuple[Plan, ...] = ()
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
        """Replace the program's outputs. `values` maps the name of each new output to its node."""
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
        """Return the symbols in the shapes of values and states, such as "T"."""
        types = [node.meta["type"] for node in self.graph.nodes if node.op != "output"]
        types += [spec.type for spec in self.states.values()]
        tensors = [item for value_type in types for item in getattr(value_type, "items", (value_type,))]
        return frozenset(size for item in tensors for size in getattr(item, "shape", ()) if isinstance(size, str))

    def diff(self, other: "Program") -> "ProgramDiff":
        """Return what this program and `other` compute differently. Names and order of calls do not count.

        The result is falsy if there are no differences: `if not one.diff(other)`.
        """
        from ingot.ir.diff import diff_programs  # here, because that module imports this one

        return diff_programs(self, other)

    def copy(self) -> "Program":
        """Return a copy of the program with a new graph and equal node names.

        The copy shares the specs of params and states, and the programs of compiled regions. These are never edited.
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
            stages=self.stages,
            history=self.history,
        )


def target_name(target: Any) -> str:
    """Return the name that a call target has in a program's text, such as "ingot.linear" or "region.r3"."""
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
    """Return the call target of this name in a program's text, such as "ingot.linear"; None if no op has it."""
    if name == "getitem":
        return operator.getitem
    if name.startswith("region."):
        return RegionCall(name.removeprefix("region."))
    if name.startswith("ingot.") and name.removeprefix("ingot.") in OPS:
        return OPS[name.removeprefix("ingot.")].overload
    return ATEN[name].overload if name in ATEN else None


def op_counts(program: Program) -> dict[str, int]:
    """Return the number of calls of each op, by op name, most frequent first.

    Calls of regions (sets of calls that are compiled together) count as "region".
    """
    counts: dict[str, int] = {}
    for node in program.calls():
        name = "region" if isinstance(node.target, RegionCall) else target_name(node.target)
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class ModelSpec:
    """A model as its config.json describes it, with equal field names for all architectures.

    `dims` describes the layers. Its class belongs to the architecture, such as
    `ingot.models.blocks.decoder.DecoderSpec` for decoders. `config` holds the config.json fields that were read,
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
    """A traced model: its programs, which share params and states.

    `entries` holds the programs by name: `main`, and for some models others such as a draft. A param or state name
    means one tensor in all of them. `round` names the entries that run in each step, in order. `expected[entry][pass]`
    is the number of matches that a pass must find, counted from the model's layers. `respelled` maps a tensor name of
    the model definition to the checkpoint's name, where they differ.
    """

    spec: ModelSpec
    entries: dict[str, Program]
    expected: Mapping[str, Mapping[str, int]]
    round: tuple[str, ...] = ("main",)
    respelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, ParamSpec]:
        """Return the params of all entries by name. An entry is one program of the model.

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
    """Return the type of a node's tensor. Raises VerifyError if the node is a state or a tuple."""
    value_type = node.meta["type"]
    if not isinstance(value_type, TensorType):
        raise VerifyError(f"%{node.name} is not a tensor but {value_type}")
    return value_type


def held_type(node: fx.Node) -> TensorType:
    """Return the type of a node's tensor. For a state, that is the tensor that the state holds.

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
    """Return the arguments of a call by parameter name, in the order of the op's parameters, with defaults filled in.

    Calls of compiled regions and of `getitem` have no parameter names. Their keys are "0", "1", and so on. Raises
    VerifyError if the arguments do not fit the op's signature.
    """
    op = definition_of(node.target)
    if op is None:
        return {str(place): value for place, value in enumerate(node.args)}
    try:
        return op.bind(node.args, node.kwargs)
    except TypeError as error:
        raise VerifyError(f"%{node.name} does not fit {target_name(node.target)}: {error}") from None


def named_values(node: fx.Node) -> dict[str, fx.Node]:
    """Return the arguments of a call that are nodes, by parameter name. Constants are left out.

    Raises VerifyError if the arguments do not fit the op's signature.
    """
    return {name: value for name, value in named_arguments(node).items() if isinstance(value, fx.Node)}


def states_written(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments of a call that are states and that the call overwrites; empty if there are none.

    The call returns the new versions in this order.
    """
    op = op_of(node.target)
    if op is None or not op.states:
        return ()
    named = named_values(node)
    return tuple(named[name] for name in op.states)


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == target


def names_in_plan(program: Program) -> dict[fx.Node, str]:
    """Return the name of each value in a plan. An output has its own name there, by which the executor finds it."""
    returned = {node: name for name, node in program.output_nodes().items()}
    named: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            named[node] = str(node.target)
        elif node.op == "call_function":
            value_type = node.meta["type"]
            named[node] = value_type.name if isinstance(value_type, StateType) else returned.get(node, node.name)
    return named
