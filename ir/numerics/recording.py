"""Record every tensor that a program computes, by names with which two programs of one model can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ingot.ir import origin
from ingot.ir.mesh import Mesh, groups, world_size
from ingot.ir.numerics.contracts import Measured, RankParams
from ingot.ir.numerics.harness import MeshRun, Run
from ingot.ir.program import Program, target_name
from ingot.ir.types import Placement, TensorType

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RecordedValue:
    """The result of a call in a recorded step. On a mesh it is the whole tensor, assembled from all ranks.

    name      the node's name; CALL/NODE inside a region (calls that are compiled together); on a mesh these are absent
    node      the node
    call      the call of the region around the node; None outside regions
    measured  the tensor in the program's dtypes and in float64
    """

    name: str
    node: fx.Node
    call: fx.Node | None
    measured: Measured

    @property
    def op(self) -> str:
        return target_name(self.node.target)

    @property
    def origin(self) -> str:
        return str((self.call or self.node).meta.get("origin", ""))

    @property
    def layer(self) -> int | None:
        return layer_of(self.node, self.call)


@dataclass(frozen=True)
class Recording:
    """The tensors that a program computed. Each step holds them by name, in the order of computation."""

    program: Program
    steps: tuple[Mapping[str, RecordedValue], ...]


def record(program: Program, params: RankParams, inputs: Sequence[Inputs], *, only_exact: bool = False) -> Recording:
    """Run a program from fresh states, one step for each of `inputs`, and record each tensor that it computes.

    Tensors are recorded in the program's dtypes and in float64, so use few tokens. `params` holds the params of each
    rank by name. With `only_exact`, the program runs only in float64, and these values are recorded in place of both.
    Params may then be in float64.
    """
    runs = []
    for exact in (True,) if only_exact else (False, True):
        watcher = _Watcher(program)
        run = MeshRun(program, params, exact=exact, watch=watcher, agree=False)
        runs.append([watcher.step(run, given) for given in inputs])
    return Recording(
        program,
        tuple(
            {
                name: RecordedValue(name, node, call, Measured(value, exact[name][2]))
                for name, (node, call, value) in found.items()
            }
            for found, exact in zip(runs[0], runs[-1], strict=True)
        ),
    )


class _Watcher:
    """Collects the results of all calls while `interpret_ranks` runs a program.

    The interpreter reports a call once per rank. It reports the calls inside a region (calls that are compiled
    together) before the call of the region.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._calls: dict[fx.Node, list[Any]] = {}
        self._bodies: dict[fx.Node, dict[fx.Node, list[Any]]] = {}
        self._body: dict[fx.Node, list[Any]] = {}

    def __call__(self, node: fx.Node, value: Any) -> None:
        if node.graph is not self.program.graph:
            self._body.setdefault(node, []).append(value)
            return
        if self._body:
            self._bodies[node], self._body = self._body, {}
        self._calls.setdefault(node, []).append(value)

    def step(self, run: Run, inputs: Inputs) -> dict[str, tuple[fx.Node, fx.Node | None, torch.Tensor]]:
        self._calls, self._bodies, self._body = {}, {}, {}
        run(inputs)
        found: dict[str, tuple[fx.Node, fx.Node | None, torch.Tensor]] = {}
        for call, values in self._calls.items():
            for node, inner in self._bodies.get(call, {}).items():
                # A body has no placements, so parts of ranks cannot be assembled.
                if isinstance(inner[0], torch.Tensor) and not self.program.mesh:
                    found[f"{call.name}/{node.name}"] = (node, call, inner[0])
            if isinstance(values[0], torch.Tensor):
                whole = assembled(values, call.meta.get("placement", ()), self.program.mesh)
                found[call.name] = (call, None, without_padding(call, whole, self.program, inputs))
        return found


def assembled(values: Sequence[torch.Tensor], placements: Any, mesh: Mesh) -> torch.Tensor:
    """Assemble a whole tensor from the `values` of all ranks of a mesh.

    `placements` say how the tensor is distributed. Shards are joined, and partial sums are added.
    """
    whole = list(values)
    for place in placements if world_size(mesh) > 1 else ():
        if not isinstance(place, Placement) or place.axis not in mesh:
            continue  # a tuple's results have their own placements, and the tuple is not a tensor
        for group in groups(mesh, place.axis):
            joined = _joined([whole[index] for index in group], place)
            for index in group:
                whole[index] = joined
    return whole[0]


def is_part_of_rows(node: fx.Node) -> bool:
    """Return whether each rank has some of a value's rows, one for each token."""
    value_type = node.meta["type"]
    return isinstance(value_type, TensorType) and value_type.shape[:1] == ("T_tp",)


def without_padding(node: fx.Node, whole: torch.Tensor, program: Program, inputs: Inputs) -> torch.Tensor:
    """Return the value of a node, assembled from all ranks, without the rows that pad the last parts.

    `inputs` are those of the step.
    """
    if not is_part_of_rows(node):
        return whole
    by_token = next(name for name, value_type in program.input_types().items() if value_type.shape[:1] == ("T",))
    return whole[: inputs[by_token].shape[0]]


def _joined(parts: list[torch.Tensor], place: Placement) -> torch.Tensor:
    if place.kind == "replicated":
        return parts[0]
    if place.kind == "partial":
        return torch.stack(parts).sum(0, dtype=parts[0].dtype)
    sizes = [size // len(parts) for size in place.segments] or [parts[0].shape[place.dim]]
    split = [part.split(sizes, place.dim) for part in parts]
    return torch.cat([torch.cat(segment, place.dim) for segment in zip(*split, strict=True)], place.dim)


def layer_of(node: fx.Node, call: fx.Node | None = None) -> int | None:
    """Return the model's layer of a node, from its origin; None outside layers.

    For a node inside a region (calls that are compiled together), `call` is the call of the region. The nodes inside
    name the layers of the first call. For another call, the difference between the layers of the two calls is added.
    """
    layer = _first_layer(node)
    if layer is None or call is None:
        return layer
    first = next(found for other in node.graph.nodes if (found := _first_layer(other)) is not None)
    begin = _first_layer(call)
    return layer if begin is None else layer + begin - first


def _first_layer(node: fx.Node) -> int | None:
    return origin.layer_of(str(node.meta.get("origin", "")))
