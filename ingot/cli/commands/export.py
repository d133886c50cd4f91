"""`ingot export`: write a model for onnxruntime-genai, as safetensors, or as a torch program."""

from typing import Any, Literal

from ingot.cli.commands import AsJson, Flag
from ingot.cli.console import console, facts, print_json, size_text


def export_to(
    source: str,
    output: str,
    /,
    *,
    to: Literal["onnx", "safetensors", "torch"],
    entry: str = "main",
    full_caches: Flag = False,
    checkpoint: str | None = None,
    revision: str | None = None,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None,
    max_seq_len: int | None = None,
    quantize: str | None = None,
    mesh: str | None = None,
    json: AsJson = False,
) -> None:
    """Write a model for onnxruntime-genai, as safetensors, or as a torch program. The output folder appears only when
    it is complete.

    Parameters
    ----------
    source
        An artifact, NAME.ingot. Or a checkpoint folder or a name on the hub, as for `ingot compile`.
    output
        The folder to create. It must not exist yet.
    to
        onnx: the decoder with its cache as inputs and outputs, genai_config.json and the tokenizer. safetensors: the
        weights as they are after merging, quantizing and sharding, with a manifest. torch: a torch ExportedProgram.
    entry
        The program to write with --to torch.
    full_caches
        With --to onnx, give layers with a window caches of the whole sequence.
    checkpoint
        Where the checkpoint of the artifact is now.
    revision
        Branch, tag or commit of a checkpoint on the hub. This and the next options need a checkpoint.
    dtype
        Dtype of weights and activations. auto keeps the checkpoint's; with --to onnx, bfloat16 becomes float32.
    max_seq_len
        Tokens of a prompt and its output together. Default: the model's own limit.
    quantize
        Store the weights of linears in this format, as in int8 or int4_g128.
    mesh
        With --to safetensors, split the weights over ranks, as in tp=2.
    """
    from ingot.cli.progress import live_progress
    from ingot.export.export import export_model
    from ingot.ir.mesh import parse_mesh

    options: dict[str, Any] = {
        "revision": revision,
        "dtype": dtype,
        "max_seq_len": max_seq_len,
        "quantize": quantize,
        "mesh": None if mesh is None else parse_mesh(mesh),
    }
    with live_progress() as progress:
        report = export_model(
            source,
            output,
            to=to,
            entry=entry,
            checkpoint=checkpoint,
            window_caches=not full_caches,
            progress=progress,
            **options,
        )
    if json:
        print_json({"output": str(report.output), "files": report.files, "notes": list(report.notes)})
        return
    out = console()
    out.print(facts([(name, size_text(size)) for name, size in report.files.items()]))
    for note in report.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    out.print(f"Wrote {output}", markup=False, soft_wrap=True)
