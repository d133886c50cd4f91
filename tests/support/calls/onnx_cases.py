"""Calls that the translation to ONNX takes or refuses, for tests of the backends that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from every_op import EveryOp, check_samples, check_size, every_op
from torch import fx

from ingot.ir.artifact.plan import Executable
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Program

# Fusible ops without a translation: formats of weights are too many for a table of nodes.
WITHOUT = {"quant_linear"}


@dataclass(frozen=True)
class Refused:
    """A call without a translation, and the reason that a claim states."""

    call: str
    reason: str

    def node(self) -> fx.Node:
        text = "program p stage=FUSED\ndim T in [1, 8]\ninput x: f32[T, 8]\ninput i: i32[T]\n"
        (node,) = parse_program(f"{text}%y = {self.call}\nreturn y=%y\n").calls()
        return node


REFUSED = {
    "an op": Refused("ingot.embedding(%i, %x) : f32[T, 8]", "no translation of ingot.embedding to ONNX"),
    "integers": Refused("aten.add.Tensor(%i, 1) : i32[T]", "no translation of aten.add.Tensor with i32[T] to ONNX"),
    "a dtype": Refused(
        "ingot.cast(%x, dtype=f8e4m3) : f8e4m3[T, 8]", "no translation of ingot.cast with f8e4m3[T, 8] to ONNX"
    ),
}


Run = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Built:
    """An executable of a body with every op that has a translation, and its files."""

    every: EveryOp
    executable: Executable
    run: Run
    folder: Path

    def check_samples(self) -> None:
        check_samples(self.every, self._results(self.every.inputs(tokens=5, rows=2)))

    def check_size(self, tokens: int, rows: int) -> None:
        inputs = self.every.inputs(tokens, rows, seed=tokens)
        check_size(self.every, inputs, self._results(inputs), T=tokens, L=rows)

    def _results(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = self.run(*(inputs[name] for name in self.every.body.input_types()))
        return dict(zip(self.every.outputs, found, strict=True))


def build_every_op(
    dtype: torch.dtype, folder: Path, emitted: Callable[[Program, Path], tuple[Executable, Run]]
) -> Built:
    """Compile and load the body; `emitted` returns the executable of a program in a folder, and its function."""
    every = every_op([dtype], without=WITHOUT)
    fusible = {name for name, op in OPS.items() if op.fusible}
    assert {op.name for op, *_ in every.samples} == fusible - WITHOUT
    return Built(every, *emitted(every.body, folder), folder)
