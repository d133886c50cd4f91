"""Find the node of a compiled region that is computed wrongly, or find that only the stored executable is wrong.

The region is compiled twice more, in parallel and without the cache: unchanged, and with every inner value as an
output. The first wrong inner value names the node. The fault may be absent then, because the compiler fuses differently
or the stored executable was made from other code. In that case, the results are compared with variants of the body in
which one call is changed. Finally, the shortest prefix of the body that still shows the fault names the node.
"""

import operator
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from ingot.compile.emitter import Emitter
from ingot.debug.bisect.execution.one_call import coarsest
from ingot.debug.bisect.execution.region_variants import explained
from ingot.debug.bisect.execution.tensor_check import Wrong, check_tensor
from ingot.ir.backend import Backend
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, Region
from ingot.ir.types import TensorType
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loaders import load_executable

Compiled = Callable[..., Sequence[torch.Tensor]]
_CACHE = "INGOT_CACHE"


@dataclass(frozen=True)
class RegionFault:
    """The fault of a region, a group of calls that one backend compiles together.

    `node` is the faulty call in the region's body, None if unknown. `stored` is True if only the artifact's executable
    is wrong: the same body gives right results when it is compiled again. `text` describes the fault.
    """

    node: fx.Node | None
    text: str
    stored: bool = False


def region_fault(
    region: Region,
    inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    backend: Backend,
    target: Target,
) -> RegionFault:
    """Find the faulty call of a region, a group of calls that one backend compiles together.

    `found` are the wrong results of the region on the tensors `inputs`. The region is compiled several times, so this
    is slow.
    """
    everything = [node for node in region.body.calls() if isinstance(node.meta["type"], TensorType)]
    judge = _Judge(region.body, inputs)
    whole, open_ = _compiled([region.body, with_outputs(region.body, everything, "opened")], backend, target)
    if (first := judge.first_wrong(everything, open_(*inputs))) is not None:
        node, wrong = first
        return RegionFault(_call_of(node), f"compiled with all its values as outputs, '{node.name}' is {wrong}")
    outputs = list(region.body.output_nodes().values())
    stored = judge.first_wrong(outputs, whole(*inputs)) is None
    text = "the same body compiled anew gives the right results" if stored else "compiled anew it is wrong too"
    if (like := explained(region.body, inputs, found, coarsest(region.body))) is not None:
        return RegionFault(like[0], f"{text}; its results are those of '{like[0].name}' {like[1]}", stored=stored)
    if stored:
        return RegionFault(None, text, stored=True)
    # The fault shows only where the compiler may fuse. The whole body shows it, and the empty prefix does not.
    right, wrong_at = 0, len(everything)
    while wrong_at - right > 1:
        middle = (right + wrong_at) // 2
        kept = [node for node in outputs if node in everything[:middle]]
        last = everything[middle - 1]
        ends = [*kept, *([] if last in kept else [last])]
        (part,) = _compiled([with_outputs(region.body, ends, f"first{middle}")], backend, target)
        if judge.first_wrong(ends, part(*inputs)) is None:
            right = middle
        else:
            wrong_at = middle
    node = everything[wrong_at - 1]
    return RegionFault(
        _call_of(node), f"compiled up to '{node.name}' the body returns wrong results, and without it right ones"
    )


def _call_of(node: fx.Node) -> fx.Node:
    """Return the call that computes a value. For an item of a tuple, return the call that computes the tuple."""
    while node.target is operator.getitem:
        made_by = node.args[0]
        assert isinstance(made_by, fx.Node)
        node = made_by
    return node


def with_outputs(body: Program, outputs: Sequence[fx.Node], name: str) -> Program:
    """Return a copy of a region's body with other outputs: the values of the nodes `outputs`.

    The copy has the name `name`. Calls that these outputs do not need are removed.
    """
    copy = body.copy()
    copy.name = name
    by_name = {node.name: node for node in copy.graph.nodes}
    copy.set_outputs({f"out{index}": by_name[node.name] for index, node in enumerate(outputs)})
    for node in reversed(list(copy.calls())):
        if not node.users:
            copy.graph.erase_node(node)
    return copy


def overflow_start(body: Program, inputs: Sequence[torch.Tensor]) -> tuple[fx.Node, float] | None:
    """Run a body in float64 and find the first value that is too large for its dtype in the program.

    Return its node and its largest absolute number. Return None if all values fit.
    """
    found: list[tuple[fx.Node, float]] = []

    def watch(node: fx.Node, result: object) -> None:
        value_type = node.meta["type"]
        if found or not isinstance(value_type, TensorType) or not isinstance(result, torch.Tensor):
            return
        if value_type.dtype.is_floating_point and result.numel():
            largest = float(torch.where(result.isfinite(), result, 0).abs().max())
            if largest > torch.finfo(value_type.dtype).max:
                found.append((node, largest))

    interpret(body, dict(zip(body.input_types(), inputs, strict=True)), exact=True, watch=watch)
    return found[0] if found else None


@dataclass(frozen=True)
class _Judge:
    """Compares the results of compiled code with the reference.

    `body` is the program of the compiled region. `inputs` are the tensors that the code ran on.
    """

    body: Program
    inputs: Sequence[torch.Tensor]

    def first_wrong(self, nodes: Sequence[fx.Node], found: Sequence[torch.Tensor]) -> tuple[fx.Node, Wrong] | None:
        """Return the first node with a wrong value, and what is wrong; None if all values are right.

        `found` has the computed value of each of the `nodes`.
        """
        plain, exact = self._values(False), self._values(True)
        for node, value in zip(nodes, found, strict=True):
            if wrong := check_tensor(value, plain[node], exact[node], coarsest(self.body)):
                return node, wrong
        return None

    def _values(self, exact: bool) -> Mapping[fx.Node, torch.Tensor]:
        values: dict[fx.Node, torch.Tensor] = {}
        given = dict(zip(self.body.input_types(), self.inputs, strict=True))
        interpret(self.body, given, exact=exact, watch=values.__setitem__)
        return values


def _compiled(bodies: Sequence[Program], backend: Backend, target: Target) -> list[Compiled]:
    """Compile each of the `bodies` as a region, in parallel. Return the loaded code as functions of tensors.

    The compile cache is not used, since it may contain the fault.
    """
    regions = [Region(f"{body.name}.{index}", body, backend.name) for index, body in enumerate(bodies)]
    with _empty_cache(), Emitter({backend.name: backend}, target, len(regions)) as emitter:
        emitted = emitter.emit(regions)
        executables = [emitted[region.name] for region in regions]
        context = on_one_device(target.device)
        return [load_executable(one, emitter.folders[one.id], context) for one in executables]


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Use an empty temporary folder as the compile cache within the `with` block. Worker processes use it too."""
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory(prefix="ingot-bisect-") as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_CACHE]
            else:
                os.environ[_CACHE] = before
