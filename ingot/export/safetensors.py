"""Write the weights of a model after the rewrites: merged, quantized and sharded, with a manifest."""

import json
from typing import Any

from ingot.cli.progress import OnProgress
from ingot.compile.folder_writer import FolderWriter
from ingot.compile.packing import SHARD_BYTES, Wanted, pack_weights
from ingot.export.source import Source
from ingot.export.weights import total_bytes
from ingot.ir.formats import PARTS
from ingot.ir.mesh import within_stage
from ingot.ir.program import ParamSpec, Program, Stage, named_arguments, target_name

WEIGHTS = "weights.json"
# Two files are in memory at a time, in addition to the mapped checkpoint: an eighth of a small model.
_FILES = 16
_LEAST_FILE = 64 << 20


def export_safetensors(source: Source, writer: FolderWriter, progress: OnProgress) -> tuple[str, ...]:
    """Write weights/NNNNN.safetensors and weights.json, and return notes for the user.

    weights.json maps the name of each weight to a JSON object:

    shape, dtype  of the stored tensor; on a mesh, of one rank's part
    from          the checkpoint's tensors that it is made of
    recipe        how it is made of them
    format, part  for a quantized weight: the storage format, and which part of the weight the tensor is
    shard         how each axis of the mesh divides it
    file, offset  where it is; or `same_as`, a weight with the same bytes; or `parts`, the places of all ranks in order
    """
    programs = {entry: source.program(entry, Stage.FUSED) for entry in source.model.entries}
    params: dict[str, ParamSpec] = {}
    formats: dict[str, dict[str, str]] = {}
    for program in programs.values():
        params |= program.params
        formats |= _formats(program)
    checkpoint = source.request.checkpoint

    def on_done(done: int, total: int) -> None:
        checkpoint.release_pages()
        progress("weights", done, total)

    pack_weights(
        {"": Wanted(params, writer)},
        checkpoint.read,
        writer,
        on_done,
        within_stage(source.request.mesh),
        file_bytes=min(SHARD_BYTES, max(_LEAST_FILE, total_bytes(params) // _FILES)),
        writers=1,
    )
    path = writer.path(WEIGHTS)
    index: dict[str, dict[str, Any]] = json.loads(path.read_text())
    for name, entry in index.items():
        entry |= {"from": sorted(params[name].recipe.sources()), **formats.get(name, {})}
    writer.write_json(WEIGHTS, index)
    return ()


def _formats(program: Program) -> dict[str, dict[str, str]]:
    """Return the format and the part of each param that is a part of a quantized weight."""
    found: dict[str, dict[str, str]] = {}
    for node in program.calls():
        if target_name(node.target) not in ("ingot.quant_linear", "ingot.dequantize", "ingot.experts"):
            continue
        given = named_arguments(node)
        for part in PARTS:
            value = given.get(part)
            if value is not None and getattr(value, "op", "") == "placeholder" and isinstance(given.get("format"), str):
                found[str(value.target)] = {"format": given["format"], "part": part}
    return found
