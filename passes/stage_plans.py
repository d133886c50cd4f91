"""Cut the plan of a program into the plans of pipeline stages.

A call runs on the stage of its layer. Calls that depend on step inputs and states alone, such as those that read
positions, run on every stage that needs them. So do calls that write a state which several stages have: every stage
has the last tokens and positions of sequences, so every stage gets the sampled tokens. All other values that a stage
lacks are sent to it.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ingot.ir.artifact.plan import BucketPlan, Instruction, Plan, Ref, Transfer, Transfers, Value
from ingot.ir.cache.memory import PlannedState, state_memory
from ingot.ir.errors import PassError
from ingot.ir.features import find_ending
from ingot.ir.parse import parse_type
from ingot.ir.program import VIEWS, Program, states_written
from ingot.ir.types import StateType
from ingot.passes.base import PassContext
from ingot.passes.plan_memory import bucket_memory, type_bytes, weight_bytes
from ingot.passes.stages import stage_of_calls


def stage_plans(
    program: Program,
    plan: Plan,
    nodes: Sequence[fx.Node],
    named: Mapping[fx.Node, str],
    workspaces: Mapping[str, int],
    context: PassContext,
) -> tuple[Plan, ...]:
    """Return the plan of each pipeline stage.

    program      the program
    plan         the plan of all of it, with one bucket class
    nodes        the calls of the plan's instructions, in order
    named        the name of each value in the plan
    workspaces   name of a region or compiled call -> peak bytes that one run allocates

    Raises PassError if the model before the ending needs a value of a later stage.
    """
    cut = _Cut(program, plan, nodes, named, stage_of_calls(program, context.first_layers), len(context.first_layers))
    cut.place()
    stages = range(len(context.first_layers))
    return tuple(_StagePlan(cut, stage).plan(workspaces, context) for stage in stages)


@dataclass
class _Cut:
    """Places the calls of a program on stages.

    own      the stage of each call by its layer
    placed   the stages that compute each call; the results of getitem belong to the call of the tuple
    """

    program: Program
    whole: Plan
    nodes: Sequence[fx.Node]
    named: Mapping[fx.Node, str]
    own: Mapping[fx.Node, int]
    count: int
    placed: dict[fx.Node, set[int]] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)

    def place(self) -> None:
        for node in self.nodes:
            if self._is_free(node):
                self.free.add(node)
            self.placed[node] = set() if node in self.free else {self.own[node]}
        for node in self.tensor_outputs().values():
            self.placed[made_by(node)].add(self.count - 1)
        touching = self._touching()
        before = -1
        while before != (before := sum(map(len, self.placed.values()))):
            for node in reversed(self.nodes):
                for source in _call_arguments(node):
                    if isinstance(source.meta["type"], StateType) or made_by(source) in self.free:
                        self.placed[made_by(source)] |= self.placed[node]
            for calls in touching.values():
                stages = set().union(*(self.placed[node] for node in calls))
                for node in calls:
                    if states_written(node):
                        self.placed[node] |= stages

    def _is_free(self, node: fx.Node) -> bool:
        """Return whether a call depends on step inputs and states alone, or is a view of a param."""
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                if source.meta["kind"] == "param" and node.target not in VIEWS:
                    return False
            elif made_by(source) not in self.free:
                return False
        return True

    def _touching(self) -> dict[str, list[fx.Node]]:
        """Return the calls that read or write each state, by its name."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if isinstance(source.meta["type"], StateType):
                    found.setdefault(source.meta["type"].name, []).append(node)
        return found

    def tensor_outputs(self) -> dict[str, fx.Node]:
        outputs = self.program.output_nodes()
        return {name: node for name, node in outputs.items() if not isinstance(node.meta["type"], StateType)}

    def host_outputs(self) -> dict[str, fx.Node]:
        """Return the outputs that the host reads, by name."""
        declared = {one.name for one in find_ending(self.program.ending.name).outputs}
        return {name: node for name, node in self.tensor_outputs().items() if name in declared}

    def read_by(self, stage: int) -> dict[fx.Node, int]:
        """Return the values that a stage needs from others, in program order, and the stage that sends each."""
        needed = {
            source
            for node in self.nodes
            if stage in self.placed[node]
            for source in _call_arguments(node)
            if stage not in self.placed[made_by(source)]
        }
        if stage == 0:
            needed |= {node for node in self.host_outputs().values() if 0 not in self.placed[made_by(node)]}
        return {node: self.own[made_by(node)] for node in self.program.calls() if node in needed}


def made_by(node: fx.Node) -> fx.Node:
    """Return the call that computes a value: the node itself, or the call that returns its tuple."""
    while node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _call_arguments(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.op == "call_function"]


class _StagePlan:
    """Makes the plan of one stage."""

    def __init__(self, cut: _Cut, stage: int) -> None:
        self._cut, self._stage, self._plan = cut, stage, cut.whole
        (self._bucket,) = cut.whole.buckets
        self._kept = [index for index, node in enumerate(cut.nodes) if stage in cut.placed[node]]
        self._received = {cut.named[node]: source for node, source in cut.read_by(stage).items()}
        self._sent = [
            Transfer(name=cut.named[node], stage=other)
            for other in range(cut.count)
            for node, source in cut.read_by(other).items()
            if source == stage
        ]
        self._outputs = dict(self._plan.outputs)
        if stage < cut.count - 1:
            # The host reads the outputs of stage 0. A value with the name of an input is an output on every stage: it
            # replaces the input.
            kept = [
                name for name in cut.host_outputs() if stage == 0 or name in {*self._received} & {*cut.whole.inputs}
            ]
            self._outputs = {name: self._plan.outputs[name] for name in kept}

    def plan(self, workspaces: Mapping[str, int], context: PassContext) -> Plan:
        program, whole = self._cut.program, self._plan
        instructions, values = self._instructions()
        nodes = [self._cut.nodes[index] for index in self._kept]
        memory = bucket_memory(program, nodes, instructions, values, workspaces, context)
        read = {name for one in instructions for name in _reads(one)} | {n for one in instructions for n in one.updates}
        inputs = {name: text for name, text in whole.inputs.items() if name in read}
        params = {name: text for name, text in whole.params.items() if name in read}
        states = {name: state for name, state in whole.states.items() if name in read}
        called = {one.calls for one in instructions}
        backends = {one.backend for one in instructions}
        bucket = BucketPlan(
            bucket=self._bucket.bucket,
            instructions=instructions,
            values=values,
            memory=memory,
            ending=sum(index < self._bucket.ending for index in self._kept),
            transfers=Transfers(
                received=tuple(Transfer(name=name, stage=source) for name, source in self._received.items()),
                sent=tuple(self._sent),
            ),
        )
        most = {name: high for name, (_, high) in whole.dims.items()}
        kept, slot, groups = state_memory(
            {name: PlannedState(state.group, parse_type(state.type), most) for name, state in states.items()}
        )
        resident = whole.memory.model_copy(
            update={
                "weights": weight_bytes(program.params[name] for name in params),
                "states": kept,
                "slot": slot,
                "groups": groups,
                "inputs": sum(type_bytes(parse_type(text), memory.sizes) for text in inputs.values()),
                "outputs": sum(type_bytes(parse_type(text), memory.sizes) for text in self._outputs.values()),
            }
        )
        return whole.model_copy(
            update={
                "inputs": inputs,
                "params": params,
                "states": states,
                "outputs": self._outputs,
                "executables": {key: one for key, one in whole.executables.items() if key in called},
                "libraries": {name: one for name, one in whole.libraries.items() if name in backends},
                "memory": resident,
                "buckets": (bucket,),
                "stage": (self._stage, self._cut.count),
            }
        )

    def _instructions(self) -> tuple[tuple[Instruction, ...], dict[str, Value]]:
        """Return the stage's instructions and values. Values are freed after their last use on this stage."""
        whole = self._bucket
        mine = [whole.instructions[index] for index in self._kept]
        types = {name: value.type for name, value in whole.values.items()}
        values = {name: Value(type=types[name], buffer="received") for name in self._received}
        for one in mine:
            for name in one.results:
                if name:
                    values[name] = self._value(name, one, values)
        kept = {*self._outputs, *(sent.name for sent in self._sent)}
        last: dict[str, int] = {}
        for index, one in enumerate(mine):
            last |= dict.fromkeys((name for name in one.results if name), index)
            last |= dict.fromkeys((name for name in _reads(one) if name in values), index)
            self._check_order(one, whole.ending, self._kept[index])
        frees: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in kept:
                frees.setdefault(index, []).append(name)
        return tuple(
            one.model_copy(update={"frees": tuple(frees.get(index, ()))}) for index, one in enumerate(mine)
        ), values

    def _value(self, name: str, made: Instruction, values: Mapping[str, Value]) -> Value:
        """Return a value that an instruction of the stage makes. A view of a value of another stage is a view of what
        the stage has received in its place."""
        value = self._bucket.values[name]
        if value.of is None or value.of in values or value.of not in self._bucket.values:
            return value
        source = _reads(made)[0]
        return value.model_copy(update={"of": values[source].of or source})

    def _check_order(self, one: Instruction, ending: int, index: int) -> None:
        for name in _reads(one):
            if index < ending and self._received.get(name, 0) > self._stage and name not in self._plan.inputs:
                raise PassError(
                    f"stage {self._stage} needs '{name}' of stage {self._received[name]} before its ending",
                    where=one.target,
                    expected="layers that read earlier layers alone",
                )


def _reads(instruction: Instruction) -> list[str]:
    return [arg.ref for arg in (*instruction.args, *instruction.kwargs.values()) if isinstance(arg, Ref)]
