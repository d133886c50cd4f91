"""Export a model: the function that `ingot export` calls."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.folder_writer import FolderWriter
from ingot.export.source import read_source
from ingot.ir.errors import OptionError
from ingot.ir.machine.extras import require

Form = Literal["onnx", "safetensors", "torch"]
FORMS = ("onnx", "safetensors", "torch")


@dataclass(frozen=True)
class ExportReport:
    """The result of an export: its folder, the size of each file in bytes, and notes for the user."""

    output: Path
    files: dict[str, int]
    notes: tuple[str, ...]


def export_model(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    entry: str = "main",
    checkpoint: str | Path | None = None,
    window_caches: bool = True,
    progress: OnProgress = no_progress,
    **options: Any,
) -> ExportReport:
    """Export an artifact or a checkpoint to the new folder `output`. Nothing is visible there before it is complete.

    - `source`: an artifact, a checkpoint folder, or a name on the hub
    - `to`: "onnx", "safetensors" or "torch"
    - `entry`: the program to export to torch
    - `checkpoint`: where the checkpoint of an artifact is now, if it has moved
    - `window_caches`: in ONNX, layers with a window have caches of about its size
    - `options`: arguments of `compile_model` for a checkpoint, such as `dtype`, `quantize` and `mesh`. An artifact has
      its own

    Raises IngotError.
    """
    if to not in FORMS:
        raise OptionError(f"unknown form '{to}'", where="--to", expected=", ".join(FORMS))
    if entry != "main" and to != "torch":
        raise OptionError(f"--entry {entry} with --to {to}", expected="--to torch")
    if to == "onnx":
        require("onnx", "onnx", "the export to ONNX", extra="onnx")
    with FolderWriter(output) as writer:
        read = read_source(
            str(source),
            checkpoint=None if checkpoint is None else str(checkpoint),
            options=options,
            progress=progress,
        )
        if to == "onnx":
            from ingot.export.onnx.export import export_onnx

            notes = export_onnx(read, writer, progress, window_caches=window_caches)
        elif to == "safetensors":
            from ingot.export.safetensors import export_safetensors

            notes = export_safetensors(read, writer, progress)
        else:
            from ingot.export.torch_program import export_torch

            notes = export_torch(read, writer, entry)
        progress("publish", 0, 0)
        writer.publish_folder()
    files = {
        path.relative_to(writer.output).as_posix(): path.stat().st_size
        for path in sorted(writer.output.rglob("*"))
        if path.is_file()
    }
    return ExportReport(writer.output, files, notes)
