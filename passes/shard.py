"""shard: splits params over the mesh as their `split` says, and infers the placement of every value."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import build, ops, recipe
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError, PassError
from ingot.ir.infer import infer
from ingot.ir.infer_placement import fit, placement_of, spot_text
from ingot.ir.mesh import mesh_text
from ingot.ir.ops import Op
from ingot.ir.ops.collectives import collective_of
from ingot.ir.placements import Spot, viewed_dim
from ingot.ir.program import ParamSpec, Program, is_call, named_arguments, named_values, tensor_type
from ingot.ir.recipe import Recipe
from ingot.ir.types import Placement, Size, TensorType, ValueType
from ingot.ir.weights import Matmul, matmul_of
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

_VIEW = torch.ops.aten.view.default


@dataclass(frozen=True)
class Shard(Pass):
    """Splits params over the devices of a mesh, and changes all types to those of the part on one rank.

    A call may need a value in another placement (distribution over ranks) than it has. Then a `redistribute` call is
    added, which insert-collectives replaces later. Each split param counts as one rewrite.
    """

    name: ClassVar[str] = "shard"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        if not context.mesh:
            return
        if program.states:
            raise PassError("the program has states already", where=self.name, expected="a pure program")
        program.mesh = dict(context.mesh)
        params = {param: param.meta["type"] for param in program.placeholders("param")}
        for param in params:
            _split_param(rewriter, param)
        _prepare(rewriter)
        types = {node: node.meta.get("type") for node in program.graph.nodes}
        walk = _Walk(rewriter, {**types, **params}, {})
        for node in list(program.calls()):
            walk.localize(node)
        end = program.graph.output_node()
        for node in program.output_nodes().values():
            for place in placement_of(node, program):
                end.replace_input_with(node, walk.moved(node, place.axis, place, None, before=end))


def _split_param(rewriter: Rewriter, param: fx.Node) -> None:
    """Divide a param over the mesh as its `split` says. Without a split, every rank holds the whole param.

    If the sizes do not fit, an optional split is ignored. For a required split, OptionError is raised.
    """
    program, name = rewriter.program, str(param.target)
    spec = program.params[name]
    split = spec.split
    program.params[name] = replace(spec, split=None)
    if split is None or split.axis not in program.mesh:
        return
    parts, size = program.mesh[split.axis], spec.type.shape[split.dim]
    assert isinstance(size, int)
    segments, made = split.segments or (size,), spec.recipe
    if any(segment % (split.unit * parts) for segment in segments):
        counts = " + ".join(str(Fraction(segment, split.unit)) for segment in segments)
        problem = f"'{name}' has {counts} parts of {split.unit}, which do not divide among {parts} ranks"
        if not split.needed:
            rewriter.refuse(param, f"{problem}: every rank holds it whole")
            return
        if not split.repeat or any(segment % split.unit for segment in segments):
            common = math.gcd(*segments) // split.unit
            sizes = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            raise OptionError(
                problem, where=f"mesh {mesh_text(program.mesh)}", expected=f"{split.axis} of {sizes}, its divisors"
            )
        times = math.lcm(*(parts // math.gcd(segment // split.unit, parts) for segment in segments))
        made = _repeated(made, spec.type.shape, split.dim, split.unit, times)
        size, segments = size * times, tuple(segment * times for segment in segments)
    if not rewriter.take(param):
        return
    place = Placement(split.axis, "shard", split.dim, segments if split.segments else ())
    local = (*spec.type.shape[: place.dim], size // parts, *spec.type.shape[place.dim + 1 :])
    sharded = recipe.shard(made, place.axis, place.dim, place.segments)
    program.params[name] = ParamSpec(TensorType(spec.type.dtype, local), sharded, (place,))
    param.meta["type"] = program.params[name].type


def _repeated(made: Recipe, shape: tuple[Size, ...], dim: int, unit: int, times: int) -> Recipe:
    """Return a recipe that writes each run of `unit` elements along `dim` `times` times.

    An example is KV heads, if there are more ranks than heads. `made` is the recipe of the tensor, and `shape` its
    shape.
    """
    sizes = [int(size) for size in shape]
    heads = (*sizes[:dim], sizes[dim] // unit, unit, *sizes[dim + 1 :])
    flat = (*sizes[:dim], sizes[dim] * times, *sizes[dim + 1 :])
    return recipe.reshape(recipe.repeat(recipe.reshape(made, heads), dim, times), flat)


def _prepare(rewriter: Rewriter) -> None:
    """Replace calls that cannot run on split weights.

    They are embeddings with split rows, and linears with a bias whose results become partial sums. Experts that return
    their input do so on every rank, so each adds a part of it.
    """
    program = rewriter.program
    for node in list(program.calls()):
        target, bound = _target(node), named_arguments(node)
        if target is ops.embedding and (place := _splits(program, bound["weight"], 0)):
            node.target, node.args = ops.vocab_embedding.overload, (bound["tokens"], bound["weight"])
            node.kwargs = {"axis": place.axis, "parts": program.mesh[place.axis]}
        elif target is ops.experts and bound["identities"]:
            split = [place for place in placement_of(bound["gate_up"], program) if place.kind == "shard"]
            parts = math.prod(program.mesh[place.axis] for place in split)
            node.kwargs = {**node.kwargs, "identity_parts": parts} if split else node.kwargs
        elif (matmul := matmul_of(node)) is None or matmul.bias is None:
            continue
        elif _splits(program, matmul.weight.parts["weight"], 1):
            _part_with_bias(rewriter, node, matmul)


def _part_with_bias(rewriter: Rewriter, node: fx.Node, matmul: Matmul) -> None:
    """Rewrite linear(x, w, b) as linear(x, w) + b. So the bias is added once, after the sum over ranks.

    The sum keeps the name of the call, because it has its value. Checks of passes compare values by name, so the
    partial sum gets a name that no other pass makes.
    """
    _, args, kwargs = replace(matmul, bias=None).call()
    graph = rewriter.program.graph
    with graph.inserting_before(node):
        part = graph.create_node("call_function", node.target, tuple(args), kwargs, name="partial_linear")
    part.meta = dict(node.meta)
    node.target, node.args, node.kwargs = torch.ops.aten.add.Tensor, (part, matmul.bias), {}


def _splits(program: Program, weight: fx.Node, dim: int) -> Placement | None:
    """Return the placement of `weight` by which a mesh axis shards it along `dim`; None if none does."""
    placements = placement_of(weight, program)
    return next((place for place in placements if place.kind == "shard" and place.dim == dim), None)


def _target(node: fx.Node) -> Op | None:
    return ops.op_of(node.target)


@dataclass
class _Walk:
    """Changes the calls of a program, in order, from whole values to the parts on one rank.

    whole   node -> type before sharding
    known   (value, new placement) -> node of the redistributed value. A placement of None means whole on every rank.
    """

    rewriter: Rewriter
    whole: dict[fx.Node, ValueType | None]
    known: dict[tuple[fx.Node, Spot], fx.Node]

    def localize(self, node: fx.Node) -> None:
        """Redistribute the arguments of a call to the placements (distributions over ranks) that its op needs.

        Then set the placement of the call, and its type on one rank.
        """
        program = self.rewriter.program
        for value in node.all_input_nodes:  # partial sums that one user needed whole are shared
            if (value, None) in self.known and any(place.kind == "partial" for place in placement_of(value, program)):
                node.replace_input_with(value, self.known[value, None])
        for axis in program.mesh:
            if is_call(node, _VIEW):
                self._localize_view(node, axis)
            elif _target(node) is not None or node.target in _ARITHMETIC:
                needs = fit(node, program, axis).needs
                for name, value in named_values(node).items():
                    at = next((place for place in placement_of(value, program) if place.axis == axis), None)
                    if at != needs.get(name):
                        moved = self.moved(value, axis, at, needs.get(name), before=node)
                        node.replace_input_with(value, moved)
        node.meta["type"] = infer(node.target, node.args, node.kwargs, program)
        build.set_placement(node, program)

    def _localize_view(self, node: fx.Node, axis: str) -> None:
        """Change the sizes of a view to those of one rank's part.

        If no dim of the view can be sharded like its argument, the argument is first gathered from all ranks.
        """
        source, sizes = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        assert isinstance(source, fx.Node)
        place = next((item for item in placement_of(source, self.rewriter.program) if item.axis == axis), None)
        if place is None or place.kind != "shard":
            return
        before, after = self.whole[source], self.whole[node]
        assert isinstance(before, TensorType) and isinstance(after, TensorType)
        found = viewed_dim(before.shape, after.shape, place.dim)
        if found is None:
            node.replace_input_with(source, self.moved(source, axis, place, None, before=node))
            return
        local, others = _elements(tensor_type(source).shape), _elements(after.shape[:found] + after.shape[found + 1 :])
        if local % others:
            raise PassError(f"a view takes {local} elements of a rank in runs of {others}", where=f"%{node.name}")
        sizes[found] = local // others
        node.args = (source, sizes)

    def moved(self, value: fx.Node, axis: str, at: Spot, need: Spot, *, before: fx.Node) -> fx.Node:
        """Return `value` in another placement (distribution over ranks) along the mesh axis `axis`.

        at       the present placement; None: whole on every rank
        need     the needed placement; None: whole on every rank
        before   node before which a `redistribute` call is added, unless an earlier one can be used

        Raises PassError if no collective does this.
        """
        if value.op == "placeholder" and value.meta["kind"] == "param":
            raise PassError(
                f"param '{value.target}' is {spot_text(at, axis)}",
                where=f"%{before.name}",
                expected=spot_text(need, axis),
            )
        if at is not None and need is not None and at.kind == need.kind == "shard":  # gather first
            value, at = self.moved(value, axis, at, None, before=before), None
        if (value, need) in self.known:
            return self.known[value, need]
        source, target = (spot.kind if spot is not None else "replicated" for spot in (at, need))
        split = at if source == "shard" else need
        if collective_of(source, target) is None or (split is not None and split.segments):
            raise PassError(
                f"no collective moves a value from {spot_text(at, axis)} to {spot_text(need, axis)}",
                where=f"%{before.name}",
            )
        attrs: dict[str, Any] = {
            "axis": axis,
            "src": source,
            "dst": target,
            "parts": self.rewriter.program.mesh[axis],
        }
        if split is not None:
            attrs["dim"] = split.dim
        result = self.rewriter.call(ops.redistribute, value, before=before, **attrs)
        self.whole[result] = self.whole[value]
        self.known[value, need] = result
        return result


_ARITHMETIC = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.slice.Tensor})


def _elements(sizes: tuple[Size, ...]) -> int:
    return math.prod(size for size in sizes if isinstance(size, int))
