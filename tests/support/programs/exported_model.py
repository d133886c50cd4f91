"""An exported model, and the logits that the program it was made of computes by reference."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ingot.export.export import ExportReport, export_model
from ingot.export.source import Source, read_source
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.program import Program, Stage

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
# Logits are the last of some ten roundings in a row in each layer, and the table is for one op.
LAYERS_FACTOR = 10.0


@dataclass(frozen=True)
class Exported:
    """An export in `folder`, and the program and weights that it was made of."""

    folder: Path
    report: ExportReport
    program: Program
    values: dict[str, torch.Tensor]

    def logits(self, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The logits [tokens, vocab] of one sequence by the reference functions of the ops."""
        given = {
            "tokens": torch.tensor(ids),
            "positions": torch.arange(len(ids)),
            "token_seqs": torch.zeros(len(ids)),
            "logit_rows": torch.arange(len(ids)),
        }
        types = self.program.input_types()
        inputs = {name: value.to(types[name].dtype) for name, value in given.items() if name in types}
        return interpret(self.program, {**self.values, **inputs})["logits"]


def program_of(source: Source) -> tuple[Program, dict[str, torch.Tensor]]:
    program = source.program("main", Stage.QUANTIZED)
    read = source.request.checkpoint.read
    return program, {name: spec.recipe.execute(read).contiguous() for name, spec in program.params.items()}


def export_onnx_of(checkpoint: Path, folder: Path, *, window_caches: bool = True, **options: Any) -> Exported:
    """Export a checkpoint in float32, or the dtype that `options` name."""
    options = {"dtype": "float32", **options}
    report = export_model(checkpoint, folder, to="onnx", window_caches=window_caches, **options)
    return Exported(folder, report, *program_of(read_source(str(checkpoint), options=options)))


def example(name: str) -> ModuleType:
    """A script of docs/examples as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode(folder: Path, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits [count, vocab] of the example for plain ONNX Runtime."""
    rows: Iterator[np.ndarray] = example("run_onnx").decode(folder, prompt, count)
    logits = np.stack(list(rows))
    return logits.argmax(-1).tolist(), torch.from_numpy(logits).float()


def other_tokens(tokens: Sequence[int], reference: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[int]:
    """The places of `tokens` that are not the greedy ones of the logits [tokens, vocab], beyond the tolerance of
    `dtype`."""
    tolerance = TOLERANCES[dtype]
    best = reference.amax(-1)
    margins = best - reference[torch.arange(len(tokens)), torch.tensor(tokens)]
    allowed = LAYERS_FACTOR * (tolerance.atol + tolerance.rtol * best.abs())
    return (margins > allowed).nonzero().flatten().tolist()
