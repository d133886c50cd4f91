"""Models with quantized weights by the kernels on a GPU, in graphs: the tokens and logits of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement import rms
from frozen_serve import Job, serve
from gpu_model import LIMITS, MODEL
from serve_artifact import teacher_forced_artifact

from ingot import compile_model
from ingot.ir.formats import find_format
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loading.loader import load_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
BATCHES = [[[7]], [list(range(1, 40))], [[n, n + 1, 3] for n in range(5)], [list(range(n, n + 70)) for n in range(3)]]
SEQUENCES = [prompt for batch in BATCHES for prompt in batch[:2]]  # 188 tokens, for a step of at most 256
NEW_TOKENS = 12
# How far logits may be from the reference's, as a part of what quantization changes. Sums in another order move a few
# activations to the next number of eight bits. On a CPU, Inductor's float32 logits are 0.01 to 0.11 of it away (three
# formats that round activations), and 4e-5 with int8 weights alone.
PART, PART_ROUNDED = 1 / 128, 1 / 4


@pytest.mark.parametrize(
    "format",
    [
        *("int8", "int8_w8a8", "fp8", "fp8_per_channel_per_token", "int4_g64", "int4_g64_asym", "int4_g32"),
        *("mxfp4", "mxfp8", "nvfp4"),
    ],
)
def test_tokens_and_logits_are_those_of_the_reference(format: str, tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "checkpoint")
    whole, plain, made = (str(tmp_path / f"{name}.ingot") for name in ("whole", "plain", "made"))
    passes = f"default,quantize{{format={format}}}"
    compile_model(checkpoint, whole, target="cpu", backend="reference", **LIMITS)
    compile_model(checkpoint, plain, target="cpu", backend="reference", passes=passes, **LIMITS)
    report = compile_model(checkpoint, made, target="cuda", passes=passes, **{**LIMITS, "jobs": 4})
    calls = [node for bucket in report.plans.plans["main"].buckets for node in bucket.instructions]
    assert not [node for node in calls if node.target == "ingot.quant_linear" and node.backend != "triton"]
    buckets = load_artifact(made, num_pages=64).plan.buckets
    assert all(is_capturable(bucket) for bucket in buckets if bucket.bucket.name.startswith("decode"))
    rounded = find_format(format).activations is not None
    unquantized, expected = (torch.cat(teacher_forced_artifact(one, SEQUENCES, None)) for one in (whole, plain))
    noise = rms(expected - unquantized)
    for chunk in (None, 7, 1):
        error = rms(torch.cat(teacher_forced_artifact(made, SEQUENCES, chunk)) - expected)
        print(f"{format}, {chunk} tokens a step: error {error:.2e}, of quantization {noise:.2e}")
        assert error <= (PART_ROUNDED if rounded else PART) * noise
    served = serve(Job(made, BATCHES, NEW_TOKENS)).tokens
    assert rounded or served == serve(Job(plain, BATCHES, NEW_TOKENS)).tokens
    assert [[len(tokens) for tokens in batch] for batch in served] == [[NEW_TOKENS] * len(batch) for batch in BATCHES]


# Sizes whose blocks of 128 columns cuBLAS takes.
_WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}


@pytest.mark.parametrize(
    ("format", "op", "backend"),
    [
        ("int4_g32", "dequantize", "triton"),
        ("int8", "dequantize", "triton"),
        ("fp8", "rounded_linear", "cublas"),
        ("fp8_per_channel_per_token", "rounded_linear", "cublas"),
        ("fp8_block128", "rounded_linear", "cublas"),
    ],
)
def test_steps_of_many_tokens_use_a_library(format: str, op: str, backend: str, tmp_path: Path) -> None:
    """In bf16, by a library and by quant_linear: both are as close to the float32 reference."""
    checkpoint = MODEL.write(tmp_path / "checkpoint", torch_dtype="bfloat16", **_WIDE)
    passes = f"default,quantize{{format={format}}}"
    limits = {**LIMITS, "jobs": 4}
    paths = {name: str(tmp_path / f"{name}.ingot") for name in ("whole", "plain", "library", "elements")}
    compile_model(checkpoint, paths["whole"], target="cpu", backend="reference", dtype="float32", **LIMITS)
    compile_model(
        checkpoint, paths["plain"], target="cpu", backend="reference", dtype="float32", passes=passes, **LIMITS
    )
    report = compile_model(checkpoint, paths["library"], target="cuda", passes=passes, **limits)
    without = f"{passes},-dequantize-linears,-separate-rounding"
    compile_model(checkpoint, paths["elements"], target="cuda", passes=without, **limits)
    made = {
        (bucket.bucket.name, node.backend)
        for bucket in report.plans.plans["main"].buckets
        for node in bucket.instructions
        if node.target == f"ingot.{op}"
    }
    assert "extend" in {name for name, _ in made} and {one for _, one in made} == {backend}
    logits = {name: torch.cat(teacher_forced_artifact(path, SEQUENCES, None)) for name, path in paths.items()}
    noise = rms(logits["plain"] - logits["whole"])
    errors = {name: rms(logits[name] - logits["plain"]) for name in ("library", "elements")}
    print(f"{format}: errors {errors}, of quantization {noise:.2e}")
    # The factor of the contract ROUNDING. By the reference backend in bf16, they are 1.004 and 1.02 times as large.
    assert errors["library"] <= 1.25 * errors["elements"]
