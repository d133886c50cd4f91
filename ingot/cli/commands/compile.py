"""`compile-model` and `ingot compile`: compile a checkpoint into an artifact, with progress and a report."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ingot.cli.commands import UNTRIED, Flag
from ingot.cli.console import console, counts_text, facts, print_table, size_text
from ingot.cli.views.memory import memory_rows
from ingot.cli.views.numerics import print_numerics
from ingot.cli.views.rounding import print_skipped, rounding_row
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from ingot.compile.compile_report import CompileReport


def compile_checkpoint(
    checkpoint: str,
    /,
    *,
    output: Annotated[str, Parameter(name=("--output", "-o"))],
    revision: str | None = None,
    target: str = "auto",
    backend: str = "auto",
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto",
    kv_cache_scales: Literal["auto", "tensor", "head", "token"] = "auto",
    max_seq_len: int | None = None,
    max_batch: int | None = None,
    max_tokens: int | None = None,
    passes: str = "default",
    quantize: str | None = None,
    quantize_method: Literal["auto", "rtn", "gptq", "awq", "smoothquant"] = "auto",
    quantize_ignore: str | None = None,
    quantize_overrides: str | None = None,
    quantize_head: Flag = False,
    calibrate: str | None = None,
    max_kl: float | None = None,
    deterministic: Flag = False,
    weight_budget: float = 1.0,
    mesh: str | None = None,
    trace: Literal["none", "summary", "full"] = "full",
    tune: Flag = False,
    tuning_log: str | None = None,
    checkpoints: str | None = None,
    keep_risky_fusions: Flag = False,
    adapter: str | None = None,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    jobs: Annotated[int | None, Parameter(name=("--jobs", "-j"))] = None,
    check_numerics: Flag = False,
) -> None:
    """Compile a checkpoint into an artifact that loads in seconds. The output folder appears only when it is complete.

    Parameters
    ----------
    checkpoint
        A Hugging Face checkpoint folder: config.json, safetensors, and a tokenizer for text prompts. Or a name on the
        Hugging Face hub, org/name or org/name@REVISION: the needed files are downloaded into the hub's cache. A local
        folder of that name takes precedence.
    output
        The artifact folder to create, NAME.ingot. It must not exist yet.
    revision
        Branch, tag or commit of a checkpoint on the hub. Default: main.
    target
        The machine to compile for. auto is the GPU if there is one, else the CPU. cuda requires the GPU. cpu is the
        CPU. A GPU can also be named by its capability, as in sm_90. Several, as in sm_90,cpu, make a fat artifact: a
        variant for each target, and one set of weights.
    backend
        Backends that may compute. auto allows all for the target, those of installed packages included. inductor
        compiles all calls that it can. triton is for GPUs. reference needs no compiler and is slow. onnx, or a backend
        of a package, computes the calls that it can, and reference the others. tensorrt does so on a GPU, and triton
        computes the others. auto,NAME lets that backend compete with all others, and is an error if it fails. auto,nccl
        leaves all sums of a mesh of GPUs to NCCL.
    dtype
        Dtype of weights and activations. auto keeps the checkpoint's.
    kv_cache_dtype
        Dtype of the KV cache. auto is the model's dtype. fp8 and int8 take half the memory of bfloat16. fp8 needs a
        CPU, or a GPU from sm_89 on.
    kv_cache_scales
        Scales of a KV cache in fp8 or int8. tensor takes the checkpoint's, or 1.0 for fp8. token computes one for each
        token and head. auto takes the checkpoint's if they are for this dtype; without any, fp8 has 1.0, and int8 has
        scales per token. head is not supported yet.
    max_seq_len
        Tokens of a prompt and its output together. Default: the model's own limit.
    max_batch
        Sequences of one step. Default: 256 on a GPU, 64 on a CPU, and no more than max_tokens.
    max_tokens
        Tokens of one step, over all its sequences. Default: 8192 on a GPU, 2048 on a CPU.
    passes
        Changes to the pipeline of passes, as in "default,-merge-linears,choose-layouts{option=value}". -NAME removes a
        pass. NAME adds a pass, or sets its options.
    quantize
        Store the weights of linears in this format, as in int8 or int4_g128. auto chooses a format for each layer: it
        needs --calibrate and --max-kl.
    quantize_method
        rtn rounds to nearest. gptq, awq and smoothquant need --calibrate. auto is gptq with --calibrate, else rtn.
    quantize_ignore
        Linears that keep their weights: patterns separated by commas, as in "layers.0.*,lm_head".
    quantize_overrides
        Other formats for some linears, as in "layers.0.*=int8,*.down=int8". The first pattern that matches decides.
    quantize_head
        Also quantize the linear that computes the logits.
    calibrate
        Text with which weights are quantized, and on which the result is measured: a text file, or a JSONL file whose
        lines have the key text. builtin is a short text that comes with Ingot.
    max_kl
        For --quantize auto: the largest KL divergence from the original model on held-out text, in nats per token.
    deterministic
        Use only backends that compute a sequence to the same bits in every batch.
    weight_budget
        Maximum memory of weights, as a multiple of their size. Above 1, a weight may be stored in a second layout.
    mesh
        Split the model over the processes of a mesh, its ranks, as in "pp=2 tp=2": tp ranks share each layer, and each
        of pp ranks has some of the layers. Such an artifact is served by all of them.
    trace
        Record of the passes. full: the program before and after each pass. summary: only the changes of each pass.
        none: nothing.
    tune
        Time tile sizes of kernels on this machine's GPU, unless the tuning log or the cache has them. This takes some
        seconds for each kernel and shape. With a tuning log, also time the backends of calls that the log lacks.
    tuning_log
        Take tile sizes, and the backends of calls, from an earlier compile that timed them. This is an artifact or its
        tuning.json.
    checkpoints
        Further checkpoints that the model's definition needs, as in draft=CHECKPOINT, separated by commas.
    keep_risky_fusions
        Make every fusion, also those that `ingot check` reports as a risk with these weights.
    adapter
        A PEFT folder with a LoRA adapter. The compile merges it into the weights.
    max_loras
        The most LoRA adapters on the device at once while serving. 0: the artifact serves none.
    max_lora_rank
        The largest rank of such an adapter.
    jobs
        Number of compiler processes. Default: the number of cores.
    check_numerics
        Measure the error of each pass on sample inputs. The compile fails if it is larger than the pass declares.
    """
    from ingot.cli.progress import live_progress

    begin = time.perf_counter()
    with live_progress() as progress:
        progress("start", 0, 0)
        from ingot.compile.driver import compile_model
        from ingot.ir.mesh import parse_mesh

        started = time.perf_counter() - begin
        axes = parse_mesh(mesh or "")
        report = compile_model(
            checkpoint,
            output,
            revision=revision,
            target=target,
            backend=backend,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_scales=kv_cache_scales,
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            max_tokens=max_tokens,
            passes=passes,
            quantize=quantize,
            quantize_method=quantize_method,
            quantize_ignore=_items(quantize_ignore),
            quantize_overrides=_pairs(quantize_overrides, "--quantize-overrides", "PATTERN=FORMAT"),
            quantize_head=quantize_head,
            calibrate=calibrate,
            max_kl=max_kl,
            deterministic=deterministic,
            weight_budget=weight_budget,
            mesh=axes,
            trace=trace,
            tune=tune,
            tuning_log=tuning_log,
            checkpoints=_pairs(checkpoints, "--checkpoints", "alias=CHECKPOINT"),
            keep_risky_fusions=keep_risky_fusions,
            adapter=adapter,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            jobs=jobs,
            check_numerics=check_numerics,
            progress=progress,
        )
    _print_report(report, output, started, time.perf_counter() - begin, servable=_servable(report))


def _items(text: str | None) -> list[str]:
    """Return the items of an option's value, separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()] if text else []


def _pairs(text: str | None, option: str, form: str) -> dict[str, str]:
    """Return the pairs of an option's value, such as "draft=FOLDER,other=org/name".

    `form` describes a pair. Raises OptionError for a malformed text.
    """
    pairs: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, equals, value = item.strip().partition("=")
        if not (name and equals and value) or name in pairs:
            raise OptionError(f"'{item}'", where=option, expected=f"{form}, each once")
        pairs[name] = value
    return pairs


def _print_report(report: "CompileReport", output: str, started: float, total: float, *, servable: bool) -> None:
    """Print the result of a compile. `output` is the artifact's path as the user wrote it.

    `started` is the seconds that imports took. `total` is the seconds of the whole command. `servable` is True if this
    machine can run the artifact. If so, the command `ingot run` is suggested.
    """
    from ingot.cli.views.quantization import print_sensitive  # imports pydantic

    out = console()
    out.print(f"\nCompiled {output} in {total:.1f} s\n", style="bold", markup=False, soft_wrap=True)
    phases = {"start": started, **report.seconds}
    width = max(len(f"{seconds:.2f}") for seconds in phases.values())
    print_table(out, facts([(name, f"{seconds:{width}.2f} s") for name, seconds in phases.items()]))
    for name, one in report.variants.items():
        out.print(f"\n{name}", style="bold", markup=False)
        _print_target(one)
        _print_memory(one)
    if not report.variants:
        out.print()
        _print_target(report)
    else:
        out.print()
        print_table(out, facts([("artifact", size_text(report.artifact_bytes)), ("build id", report.build_id)]))
    for note in dict.fromkeys(note for one in (report, *report.variants.values()) for note in one.notes):
        out.print(f"warning: {note}", style="yellow", markup=False, soft_wrap=True)
    if report.rounding.risks:
        print_skipped(out, report.rounding.risks)
    if report.quantization is not None:
        print_sensitive(out, report.quantization)
    if report.numerics is not None:
        print_numerics(out, report.numerics)
    if not report.variants:
        _print_memory(report)
    prompt = '"…"' if (Path(output) / "tokenizer" / "tokenizer.json").is_file() else "--prompt-ids 1,2,3"
    path = shlex.quote(output)
    following = [f"ingot run {path} {prompt}"] * servable + [f"ingot inspect {path}"]
    out.print("\nNext:  " + "\n       ".join(following), markup=False, soft_wrap=True)


def _servable(report: "CompileReport") -> bool:
    """Return whether this machine can run the artifact, or a variant of it."""
    return any(not one.no_golden_run for one in (report.variants.values() or [report]))


def _print_target(report: "CompileReport") -> None:
    """Print what was compiled for one target."""
    from ingot.cli.views.quantization import quantization_text  # imports pydantic

    out = console()
    cached = f", {report.cached_executables} from the cache" if report.cached_executables else ""
    print_table(
        out,
        facts(
            [
                ("regions", f"{report.regions} calls of {report.distinct_regions} distinct executables{cached}"),
                ("nodes per backend", counts_text(report.nodes_per_backend)),
                *([("checkpoint", report.origin)] if report.origin else []),
                *rounding_row(report.rounding),
                *([("quantized", quantization_text(report.quantization))] if report.quantization else []),
                ("artifact", size_text(report.artifact_bytes)),
                ("build id", report.build_id),
                *([("golden run", f"none: {report.no_golden_run}")] if report.no_golden_run else []),
                *([] if report.tried else [("untried", UNTRIED)]),
            ]
        ),
    )


def _print_memory(report: "CompileReport") -> None:
    """Print the memory that serving takes on one target."""
    out = console()
    out.print("\nMemory", style="bold")
    print_table(out, facts([*memory_rows(report.plans), *_second_copies(report)]))


def _second_copies(report: "CompileReport") -> list[tuple[str, object]]:
    copies = report.second_copies
    if not copies:
        return []
    names = ", ".join(copy.first for copy in copies)
    return [("second copies", f"{size_text(sum(copy.bytes for copy in copies))} of the weights: {names}")]
