"""Perplexity and KL divergence of quantized weights, on text that the model has not seen.

    python benchmarks/quality.py --stdlib /path/to/python3.13.0/lib/python3.13 [--windows 32] [--steps 500]

The model is pico, and the text is what its training held out of CPython 3.13.0's standard library. Weights are
calibrated with the text that comes with Ingot. Programs run with the tensors that an artifact stores, in the model's
dtype. Then `--quantize auto` runs on three small models that small_models.py trains.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import RESULTS, ROOT, Figure, print_figures, write_result

from ingot.compile.request import Request
from ingot.debug.bisect.programs.chain import context_of
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.quantized_weights import kl_divergence
from ingot.ir.program import Program, Stage
from ingot.passes.manager import run_pass
from ingot.quantizing.texts import BUILTIN_FILE, read_documents

PICO = ROOT / "models" / "pico"
LENGTH = 512  # tokens of a window
_PAGES = 64


@dataclass(frozen=True)
class Case:
    """A way to quantize pico: the options of `compile_model`."""

    format: str
    method: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.format}.{self.method}"


def _case(format: str, method: str, **options: Any) -> Case:
    calibrate = {} if method == "rtn" else {"calibrate": "builtin"}
    return Case(format, method, {"quantize": format, "quantize_method": method, **calibrate, **options})


CASES = (
    _case("int8", "rtn"),
    _case("int8_w8a8", "rtn"),
    _case("fp8", "rtn"),
    _case("int4_g128", "rtn"),
    _case("int4_g128", "awq"),
    _case("int4_g128", "gptq"),
    _case("int4_g128_asym", "rtn"),
    _case("nf4", "rtn"),
    _case("mxfp4", "rtn"),
    Case("kv_fp8", "none", {"kv_cache_dtype": "fp8"}),
    Case("kv_fp8", "token", {"kv_cache_dtype": "fp8", "kv_cache_scales": "token"}),
    Case("kv_int8", "token", {"kv_cache_dtype": "int8", "kv_cache_scales": "token"}),
)
BOUNDS = (0.00005, 0.0005)
# Characters of the small models' calibration text. Each is a token, so the builtin text would be four times as long as
# for other models.
_CHARACTERS = 24_000


def program_of(request: Request) -> tuple[Program, dict[str, torch.Tensor], Request]:
    """Return the program that a compile of this request makes, its params, and the calibrated request.

    The program has no cache, which would change no number, unless the cache has a dtype of its own.
    """
    last = Stage.QUANTIZED if request.kv_cache_dtype == "auto" else Stage.CACHED
    model = request.trace()
    request = request.calibrated(model, request.identity(model))
    program = model.entries["main"]
    context = context_of(request, request.pipeline(), program)
    for phase in request.pipeline():
        if phase.stage <= last:
            for one in phase.passes:
                program, _ = run_pass(one, program, context, under=phase.stage)
    return program, load_params(program.params, request.checkpoint.read, memo={}), request


def logits(program: Program, params: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    run = InterpreterRun(program, params, pages=_PAGES)
    return teacher_forced(program.input_types(), run, [tokens], pages=_PAGES)[0].float()


@dataclass(frozen=True)
class Measured:
    """The mean KL divergence from the original model in nats, and the perplexity."""

    kl: float
    perplexity: float


def measure(
    program: Program,
    params: Mapping[str, torch.Tensor],
    windows: Sequence[Sequence[int]],
    original: Sequence[torch.Tensor] | None = None,
) -> tuple[Measured, list[torch.Tensor]]:
    """Return the figures of a program on windows of tokens, and its logits. `original` are those to compare with."""
    kl = loss = 0.0
    kept = []
    with torch.no_grad():
        for index, tokens in enumerate(windows):
            found = logits(program, params, tokens)
            loss += float(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(tokens[1:])))
            if original is None:
                kept.append(found)
            else:
                kl += kl_divergence(original[index], found)
    return Measured(kl / len(windows), math.exp(loss / len(windows))), kept


def held_out(stdlib: Path, count: int) -> list[list[int]]:
    """Return `count` windows of LENGTH tokens, evenly from the files that pico's training held out.

    Exits if `stdlib` is not the library that pico was trained on.
    """
    from tokenizers import Tokenizer

    spec = importlib.util.spec_from_file_location("train_pico", PICO / "train.py")
    assert spec is not None and spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = train  # its dataclasses look their module up
    spec.loader.exec_module(train)
    corpus = train.collect(stdlib, 0.03)
    expected = json.loads((PICO / "training.json").read_text(encoding="utf-8"))
    if corpus.held_out_bytes != expected["held_out_bytes"]:
        sys.exit(f"{stdlib} is not the library of {expected['data']}: {corpus.held_out_bytes} bytes are held out")
    tokenizer = Tokenizer.from_file(str(PICO / "tokenizer.json"))
    tokens = [token for text in corpus.held_out for token in (0, *tokenizer.encode(text).ids)]
    return [tokens[begin : begin + LENGTH] for begin in range(0, len(tokens) - LENGTH, len(tokens) // count)][:count]


def pico_figures(windows: Sequence[Sequence[int]], cases: Sequence[Case]) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of each case."""
    program, params, _ = program_of(Request.read(PICO, target="cpu"))
    base, original = measure(program, params, windows)
    yield "bf16.none.perplexity", Figure(value=base.perplexity, unit="", what="perplexity in bfloat16")
    print(f"bf16  perplexity {base.perplexity:.4f}", flush=True)
    for case in cases:
        begin = time.perf_counter()
        program, params, _ = program_of(Request.read(PICO, target="cpu", **case.options))
        ready = time.perf_counter() - begin
        found, _ = measure(program, params, windows, original)
        stored = sum(params[name].nbytes for name in program.params)
        yield f"{case.name}.perplexity", Figure(value=found.perplexity, unit="", what=f"{case.name}: perplexity")
        yield f"{case.name}.kl", Figure(value=found.kl, unit="", what=f"{case.name}: mean KL divergence in nats")
        yield f"{case.name}.bytes", Figure(value=stored, unit="B", what=f"{case.name}: bytes of the params")
        worse = 100 * (found.perplexity / base.perplexity - 1)
        print(
            f"{case.name:24} perplexity {found.perplexity:.4f} ({worse:+.2f} %)  KL {found.kl:.5f}  "
            f"{stored / 1e6:.1f} MB  quantized in {ready:.0f} s",
            flush=True,
        )


def auto_figures(folder: Path, steps: int, bounds: Sequence[float] = BOUNDS) -> Iterator[tuple[str, Figure]]:
    """Train the small models, and yield for each bound the divergence that `auto` reached on its held-out text.

    The divergence is measured again here, by the interpreter with the stored tensors, in the model's dtype.
    """
    from small_models import CONFIGS, train

    text = folder / "text.txt"
    documents = "\n".join(read_documents(BUILTIN_FILE))
    text.write_text(documents[:_CHARACTERS], encoding="utf-8")
    for name in CONFIGS:
        checkpoint = train(name, folder, steps)
        program, params, _ = program_of(Request.read(checkpoint, target="cpu"))
        original: list[torch.Tensor] | None = None
        for bound in bounds:
            options = {"quantize": "auto", "calibrate": text, "max_kl": bound}
            chosen, values, request = program_of(Request.read(checkpoint, target="cpu", **options))
            assert request.calibration is not None and request.text is not None
            record, windows = request.calibration.record, request.text.held_out
            if original is None:
                _, original = measure(program, params, windows)
            found, _ = measure(chosen, values, windows, original)
            key = f"auto_{name}.{bound}"
            what = f"--quantize auto --max-kl {bound} on a small {name} model"
            yield f"{key}.kl", Figure(value=record.kl, unit="", what=f"{what}: KL divergence that it measured, in nats")
            yield f"{key}.again", Figure(value=found.kl, unit="", what=f"{what}: the same in bfloat16")
            share = sum(values[one].nbytes for one in chosen.params) / sum(params[one].nbytes for one in program.params)
            yield f"{key}.bytes", Figure(value=share, unit="", what=f"{what}: bytes, of the original ones")
            print(f"{what}: {record.kl:.5f}, in bfloat16 {found.kl:.5f}, {100 * share:.0f} % of the bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stdlib", type=Path, help="the library of CPython 3.13.0; without it, only the small models")
    parser.add_argument("--windows", type=int, default=32, help=f"windows of {LENGTH} tokens")
    parser.add_argument("--only", help="cases whose name contains this; no result is written")
    parser.add_argument("--steps", type=int, default=500, help="training steps of the small models; 0: only pico")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    keep = {"packages": ("torch",), "folder": options.results}
    if options.stdlib is not None:
        cases = [case for case in CASES if options.only is None or options.only in case.name]
        figures = dict(pico_figures(held_out(options.stdlib, options.windows), cases))
        print_figures(figures)
        if options.only is None:
            settings = {"windows": options.windows, "length": LENGTH, "calibrate": "builtin"}
            print(write_result(__file__, "quality", settings, figures, **keep))
    if options.steps:
        with tempfile.TemporaryDirectory(prefix="ingot-quality-") as folder:
            figures = dict(auto_figures(Path(folder), options.steps))
        print_figures(figures)
        print(write_result(__file__, "quality_auto", {"steps": options.steps}, figures, **keep))


if __name__ == "__main__":
    main()
