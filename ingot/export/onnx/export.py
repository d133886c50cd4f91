"""Write the folder of an ONNX export: model, weights, genai_config.json and the tokenizer's files."""

import shutil
from pathlib import Path

import torch

from ingot.cli.progress import OnProgress
from ingot.compile.folder_writer import FolderWriter
from ingot.export.onnx.genai_config import GENAI_CONFIG, genai_config, read_generation
from ingot.export.onnx.model import DATA, MODEL, build_decoder, write_decoder
from ingot.export.source import Source, refuse_mesh
from ingot.ir.errors import ArtifactError
from ingot.ir.program import Stage
from ingot.runtime.text.tokenizer import Tokenizer


def export_onnx(
    source: Source, writer: FolderWriter, progress: OnProgress, *, window_caches: bool = True
) -> tuple[str, ...]:
    """Write the decoder `main` as ONNX, and return notes for the user. Raises ExportError for what ONNX cannot express.

    A model in bfloat16 is exported in float32: ONNX Runtime's CPU has no attention in bfloat16.
    """
    refuse_mesh(source, "ONNX")
    notes = []
    if source.request.spec.dtype == torch.bfloat16:
        source = source.in_dtype(torch.float32)
        notes.append("bfloat16 weights are written as float32")
    request = source.request
    decoder = build_decoder(
        source.program("main", Stage.QUANTIZED), request.limits.max_seq_len, window_caches=window_caches
    )
    files = request.checkpoint.tokenizer_files
    generation = read_generation(files)
    content = genai_config(
        request.checkpoint.config,
        generation,
        decoder.layers,
        filename=MODEL,
        vocab_size=decoder.vocab_size,
        max_seq_len=request.limits.max_seq_len,
        eos_token_ids=_end_tokens(source),
        window_caches=window_caches,
    )
    writer.write_json(GENAI_CONFIG, content)
    for name, path in files.items():
        shutil.copyfile(path, writer.path(name))
    folder = writer.path(MODEL).parent

    def on_done(done: int, total: int) -> None:
        request.checkpoint.release_pages()
        progress("weights", done, total)

    write_decoder(decoder, folder, request.checkpoint.read, on_done)
    writer.sync_soon(DATA)
    if decoder.graph.decoded:
        formats = sorted(set(decoder.graph.decoded.values()))
        notes.append(
            f"{len(decoder.graph.decoded)} quantized weights are written as float32: MatMulNBits has no form for "
            f"{', '.join(formats)}"
        )
    if "tokenizer.json" not in files:
        notes.append("the checkpoint has no tokenizer.json, so the export takes token ids only")
    return tuple(notes)


def _end_tokens(source: Source) -> list[int]:
    """Return the tokens that end a sequence: those with which Ingot serves the model."""
    config = source.request.checkpoint.config
    files = source.request.checkpoint.tokenizer_files
    fallback = config.get("eos_token_id")
    own = [one for one in (fallback if isinstance(fallback, list) else [fallback]) if isinstance(one, int)]
    if "tokenizer.json" not in files:
        generation = read_generation(files).get("eos_token_id")
        listed = [one for one in (generation if isinstance(generation, list) else [generation]) if isinstance(one, int)]
        return listed or own
    folder = Path(files["tokenizer.json"]).parent
    try:
        return sorted(Tokenizer.load(folder, own).eos_token_ids)
    except ArtifactError as error:
        raise ArtifactError(f"the tokenizer cannot be read: {error.what}", where=error.where) from error
