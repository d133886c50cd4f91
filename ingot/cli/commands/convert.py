"""`ingot convert`: convert grouped-query attention of a checkpoint into latent attention."""

from dataclasses import asdict
from typing import Literal

from ingot.cli.commands import AsJson, Flag
from ingot.cli.console import console, facts, print_json


def convert_checkpoint(
    source: str,
    output: str,
    /,
    *,
    to: Literal["mla"],
    rank: int | None = None,
    rope_dim: int | None = None,
    freqfold: int | None = None,
    calibrate: str = "builtin",
    keep_all: Flag = False,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    max_seq_len: int | None = None,
    revision: str | None = None,
    json: AsJson = False,
) -> None:
    """Convert a checkpoint with grouped-query attention into a checkpoint with latent attention (TransMLA), and print
    the perplexity after each step. The output folder appears only when it is complete.

    Parameters
    ----------
    source
        A checkpoint folder or a name on the hub, as for `ingot compile`.
    output
        The folder to create. It must not exist yet.
    to
        mla: latent attention, with one rotated key for all heads.
    rank
        Elements of the latent of keys and values. The cache has as many for a token, and those of --rope-dim.
    rope_dim
        Elements of the rotated key: a divisor of a head's elements, or a multiple. Default: 64.
    freqfold
        Number of adjacent rotary frequencies that are treated as one. More move more into the rotated key, and mixing
        them changes the model. Default: searched with the text; 1 with --keep-all.
    calibrate
        A file with text, or builtin: the text that comes with Ingot. Half of it measures the perplexity.
    keep_all
        Rotate the keys, and cut nothing. Without --freqfold, the model computes what the source does.
    dtype
        Dtype of weights. auto keeps the checkpoint's.
    max_seq_len
        Most tokens of a sequence of the text. Default: the model's own limit, or 512.
    revision
        Branch, tag or commit of a checkpoint on the hub.
    """
    from ingot.cli.progress import live_progress
    from ingot.convert.convert import convert_model

    with live_progress() as progress:
        report = convert_model(
            source,
            output,
            to=to,
            rank=rank,
            rope_dim=rope_dim,
            freqfold=freqfold,
            calibrate=calibrate,
            keep_all=keep_all,
            dtype=dtype,
            max_seq_len=max_seq_len,
            revision=revision,
            progress=progress,
        )
    if json:
        print_json({**asdict(report), "output": str(report.output)})
        return
    out = console()
    sizes = [("architecture", report.architecture), ("rank", str(report.rank)), ("rotated", str(report.rope_dim))]
    text = f"{report.calibrated_on}: {report.tokens} tokens, and {report.held_out} to measure on"
    out.print(facts([*sizes, ("freqfold", str(report.freqfold)), ("text", text)]))
    out.print(facts([(f"after {one.name}" if one.name != "source" else "source", _gate(one)) for one in report.gates]))
    out.print(f"Wrote {output}", markup=False, soft_wrap=True)


def _gate(gate: object) -> str:
    from ingot.convert.mla.convert import Gate

    assert isinstance(gate, Gate)
    return f"perplexity {gate.perplexity:.3f}, cache {100 * gate.cache:.0f} %"
