"""Convert a model: the function that `ingot convert` calls."""

from dataclasses import dataclass, replace
from pathlib import Path

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.folder_writer import FolderWriter
from ingot.compile.request import Request
from ingot.convert.mla.convert import Conversion, Converted, Gate, heads_of
from ingot.convert.mla.sizes import check_sizes
from ingot.convert.tensor_shards import TensorShards
from ingot.frontend.checkpoint_files import CONFIG
from ingot.ir.errors import OptionError
from ingot.quantizing.texts import BUILTIN, read_text

# TransMLA's default, and the width that kernels for DeepSeek's attention have.
ROPE_DIM = 64


class _Writer(FolderWriter):
    what = "a converted checkpoint"


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion: its folder, the sizes of the new attention, and the perplexity after each step."""

    output: Path
    architecture: str
    rank: int
    rope_dim: int
    freqfold: int
    calibrated_on: str
    tokens: int
    held_out: int
    gates: tuple[Gate, ...]


def convert_model(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    rank: int | None = None,
    rope_dim: int | None = None,
    freqfold: int | None = None,
    calibrate: str | Path = BUILTIN,
    keep_all: bool = False,
    revision: str | None = None,
    dtype: str = "auto",
    max_seq_len: int | None = None,
    progress: OnProgress = no_progress,
) -> ConvertReport:
    """Convert a checkpoint into the new folder `output`. Nothing is visible there before it is complete.

    - `source`: a checkpoint folder, or a name on the hub
    - `to`: "mla", latent attention
    - `rank`: elements of the latent of keys and values
    - `rope_dim`: elements of the rotated key; None: 64
    - `freqfold`: number of adjacent frequencies that one rotation mixes; None: searched, and 1 with `keep_all`
    - `calibrate`: "builtin", or the path of a text
    - `keep_all`: rotate keys and cut nothing: the model computes what the source does, unless frequencies are folded
    - `dtype`: of weights; "auto": the source's
    - `max_seq_len`: most tokens of a sequence of the text

    Raises IngotError.
    """
    if to != "mla":
        raise OptionError(f"unknown form '{to}'", where="--to", expected="mla")
    if keep_all and (rank is not None or rope_dim is not None):
        given = "--rank" if rank is not None else "--rope-dim"
        raise OptionError(f"--keep-all with {given}", expected="one of them: --keep-all cuts nothing")
    if not keep_all and rank is None:
        raise OptionError(
            "--to mla without --rank", expected="--rank N, the elements of the latent of keys and values, or --keep-all"
        )
    with _Writer(output) as writer:
        request = Request.read(
            source,
            revision=revision,
            target="cpu",
            backend="reference",  # nothing is compiled
            dtype=dtype,
            max_seq_len=max_seq_len,
            progress=progress,
        )
        where, heads = str(request.checkpoint.folder), heads_of(request)
        wanted = heads.keys if keep_all else ROPE_DIM if rope_dim is None else rope_dim
        # Without a number, the search begins at the fewest frequencies that the rotated elements allow.
        fewest = max(1, heads.width // max(1, wanted))
        sizes = check_sizes(heads, rank, wanted, fewest if freqfold is None else freqfold, where)
        text = read_text(str(calibrate), request.checkpoint.folder, request.spec.vocab_size, request.limits.max_seq_len)
        progress("calibrate", 0, 0)
        conversion = Conversion.of(request, text, lambda done, total: progress("calibrate", done, total))
        if freqfold is None and not keep_all:
            progress("freqfold", 0, 0)
            fold = conversion.best_freqfold(sizes, lambda done, total: progress("freqfold", done, total))
            sizes = replace(sizes, freqfold=fold)
        gates = tuple(conversion.gates(sizes, lambda done, total: progress("measure", done, total)))
        record = {
            "source": request.spec.architecture,
            "rank": sizes.rank,
            "rope_dim": sizes.rope_dim,
            "freqfold": sizes.freqfold,
            "text": text.name,
            "tokens": conversion.text.tokens,
            "perplexity": {one.name: one.perplexity for one in gates},
        }
        _write(conversion.made(sizes, record), conversion, writer, progress)
        progress("publish", 0, 0)
        writer.publish_folder()
    return ConvertReport(
        output=writer.output,
        architecture=heads.target,
        rank=sizes.rank,
        rope_dim=sizes.rope_dim,
        freqfold=sizes.freqfold,
        calibrated_on=text.name,
        tokens=conversion.text.tokens,
        held_out=sum(map(len, text.held_out)),
        gates=gates,
    )


def _write(made: Converted, conversion: Conversion, writer: FolderWriter, progress: OnProgress) -> None:
    """Write the converted tensors, the other tensors of the source as they are, config.json and the tokenizer."""
    checkpoint, spec = conversion.request.checkpoint, conversion.request.spec
    ours = {theirs: name for name, theirs in conversion.model.respelled.items()}
    kept = [name for name in checkpoint.tensors if ours.get(name, name) not in made.weights.replaced]
    kept = [name for name in kept if ours.get(name, name) not in made.weights.recipes]
    shards, total = TensorShards(writer), len(kept) + len(made.weights.recipes)
    for done, name in enumerate(kept, 1):
        tensor = checkpoint.read(name)
        converts = conversion.request.options["dtype"] != "auto" and tensor.is_floating_point()
        shards.store(ours.get(name, name), tensor.to(spec.dtype) if converts else tensor)
        progress("weights", done, total)
    for done, (name, recipe) in enumerate(made.weights.recipes.items(), len(kept) + 1):
        renamed = recipe.renamed(lambda given: conversion.model.respelled.get(given, given))
        shards.store(name, renamed.execute(made.read))
        progress("weights", done, total)
    shards.finish()
    for name, path in checkpoint.tokenizer_files.items():
        writer.write_bytes(name, path.read_bytes())
    writer.write_json(CONFIG, dict(made.fields))
