"""Write an entry as a torch ExportedProgram, which runs with plain torch."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ingot.compile.folder_writer import FolderWriter
from ingot.export.source import Source, refuse_mesh
from ingot.export.weights import made_in_turn
from ingot.ir.errors import ExportError
from ingot.ir.ops import op_of
from ingot.ir.program import Program, Stage, target_name
from ingot.ir.types import TensorType

INTERFACE = "interface.json"
# Ops whose references branch on the numbers of tensors.
_BRANCHING = frozenset({"ingot.experts"})


def export_torch(source: Source, writer: FolderWriter, entry: str) -> tuple[str, ...]:
    """Write ENTRY.pt2 and interface.json, and return notes for the user.

    The program takes whole sequences, one after another, and has no cache: stage QUANTIZED. interface.json has the
    types of its inputs and outputs in order. Raises ExportError if torch.export refuses the program.
    """
    refuse_mesh(source, "a torch program")
    program = source.program(entry, Stage.QUANTIZED)
    if program.states:
        raise ExportError(
            f"entry {entry} has the state '{next(iter(program.states))}'",
            where=source.given,
            expected="an entry that computes from its inputs alone",
        )
    if branching := [node for node in program.calls() if target_name(node.target) in _BRANCHING]:
        raise ExportError(
            f"{target_name(branching[0].target)} has no form in torch.export: it multiplies by the experts that the "
            "numbers choose",
            where=f"{source.given}, entry {entry}, {branching[0].meta.get('origin', '')}",
            expected="a model without experts",
        )
    module = _Module(program, source)
    inputs = program.input_types()
    examples, shapes = _examples(inputs), _shapes(program, inputs)
    try:
        exported = torch.export.export(module, examples, dynamic_shapes=(shapes,))
    except Exception as error:  # torch.export raises types of its own for what it cannot trace
        raise ExportError(
            f"torch.export refuses the program: {str(error).strip()}"[:600], where=f"entry {entry}"
        ) from error
    path = writer.path(f"{entry}.pt2")
    torch.export.save(exported, path)
    writer.write_json(
        INTERFACE,
        {
            "inputs": {name: str(value_type) for name, value_type in inputs.items()},
            "outputs": {name: str(node.meta["type"]) for name, node in program.output_nodes().items()},
        },
    )
    return ()


class _Module(nn.Module):
    """Runs a program with the reference functions of its ops. Weights are buffers, named as in the program."""

    def __init__(self, program: Program, source: Source) -> None:
        super().__init__()
        self.program = program
        tensors = made_in_turn([[spec] for spec in program.params.values()], source.request.checkpoint.read)
        self._buffer_of: dict[str, str] = {}
        for name, (tensor,) in zip(program.params, tensors, strict=True):
            self._buffer_of[name] = name.replace(".", "__")
            self.register_buffer(self._buffer_of[name], tensor)

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        given = dict(zip(self.program.input_types(), inputs, strict=True))
        values: dict[fx.Node, Any] = {}
        for node in self.program.placeholders():
            name = str(node.target)
            values[node] = getattr(self, self._buffer_of[name]) if name in self._buffer_of else given[name]
        for node in self.program.calls():
            args: Any = fx.node.map_arg(node.args, values.__getitem__)
            kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
            if node.target is operator.getitem:
                values[node] = args[0][args[1]]
                continue
            op = op_of(node.target)
            call = node.target if op is None else op.reference
            assert callable(call)
            values[node] = call(*args, **kwargs)
        return {name: values[node] for name, node in self.program.output_nodes().items()}


def _examples(inputs: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...]:
    """Return inputs of distinct sizes, so that torch.export takes none for another or for a constant."""
    symbols = sorted({size for one in inputs.values() for size in one.shape if isinstance(size, str)})
    sizes = {symbol: 5 + 2 * place for place, symbol in enumerate(symbols)}
    return tuple(torch.zeros(one.bind(sizes), dtype=one.dtype) for one in inputs.values())


def _shapes(program: Program, inputs: Mapping[str, TensorType]) -> tuple[dict[int, Any], ...]:
    dims = {name: torch.export.Dim(name, min=dim.lo, max=dim.hi) for name, dim in program.dims.items()}
    return tuple(
        {axis: dims[size] for axis, size in enumerate(one.shape) if isinstance(size, str)} for one in inputs.values()
    )
