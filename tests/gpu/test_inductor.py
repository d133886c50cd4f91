"""Regions by AOTInductor on a GPU: right at every size, in graphs, and served where there is no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from every_op import DTYPES, L_MAX, T_MAX, every_op
from frozen_serve import Job, serve, serve_frozen
from gpu_model import LIMITS, MODEL
from installed import install_example

from ingot import compile_model
from ingot.backends.inductor.emit_cuda import InductorCuda
from ingot.backends.inductor.load import load
from ingot.compile.emitter import Emitter
from ingot.ir.artifact.record import Numerics
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.parse import parse_program
from ingot.ir.program import Region
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loader import load_artifact

ROOT = Path(__file__).parents[2]
# AOTInductor takes a minute for the first region of a process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.xdist_group("inductor_on_a_gpu")]
BATCHES = [[[7]], [list(range(1, 40))], [[n, n + 1, 3] for n in range(5)], [list(range(n, n + 70)) for n in range(3)]]
NEW_TOKENS = 12


def decode_is_capturable(artifact: Path) -> bool:
    plan = load_artifact(artifact, num_pages=64).plan
    return all(is_capturable(bucket) for bucket in plan.buckets if bucket.bucket.name.startswith("decode"))


COMPILE = """
import json, sys
from ingot import compile_model
checkpoint, output, limits = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
compile_model(checkpoint, output, target="cuda", passes="default,fuse-swiglu", **limits)
"""


def test_an_op_without_a_kernel_is_served_by_inductor(tmp_path: Path) -> None:
    """An op of another package, for which no kernel exists: compiled into regions, captured in graphs, and served
    where neither that package nor a compiler nor the folder that it was compiled in is left."""
    checkpoint, plain, made = MODEL.write(tmp_path / "checkpoint"), tmp_path / "plain.ingot", tmp_path / "made.ingot"
    install_example(tmp_path / "site", "my_op")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "INGOT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILE, str(checkpoint), str(made), json.dumps({**LIMITS, "jobs": 2})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    choices: Mapping[str, Any] = json.loads((made / "choices.json").read_text())
    for name, chosen in choices.items():
        assert "inductor" in chosen["backends"].values(), name
        assert "triton: no kernel for ingot.swiglu" in chosen["refusals"]["reasons"], name
    assert "swiglu" not in (made / "plan.json").read_text(), "no instruction calls the op itself"
    assert open_artifact(made).manifest.versions == {"torch": torch.__version__}

    compile_model(checkpoint, plain, target="cpu", backend="reference", **LIMITS)
    shutil.rmtree(tmp_path / "cache")
    artifact = made.rename(tmp_path / "elsewhere.ingot")
    assert decode_is_capturable(artifact)
    frozen = serve_frozen(Job(str(artifact), BATCHES, NEW_TOKENS), os.environ, tmp_path)
    assert frozen.tokens == serve(Job(str(plain), BATCHES, NEW_TOKENS)).tokens
    assert frozen.refused == [] and {1, 4, 8} <= set(frozen.graphs)


@pytest.mark.slow
def test_quantized_products(tmp_path: Path) -> None:
    """Those in a format without a kernel of ours are captured all the same."""
    checkpoint, plain, made = MODEL.write(tmp_path / "checkpoint"), tmp_path / "plain.ingot", tmp_path / "made.ingot"
    passes = 'default,quantize{format="u4/1x32:f32:offsets/low_first"}'
    compile_model(checkpoint, plain, target="cpu", backend="reference", passes=passes, **LIMITS)
    report = compile_model(checkpoint, made, target="cuda", passes=passes, **{**LIMITS, "jobs": 4})
    assert report.nodes_per_backend["inductor"] > 0
    assert decode_is_capturable(made)
    assert serve(Job(str(made), BATCHES, NEW_TOKENS)).tokens == serve(Job(str(plain), BATCHES, NEW_TOKENS)).tokens


@pytest.mark.slow
def test_all_that_has_no_state_by_inductor(tmp_path: Path) -> None:
    checkpoint, plain, made = MODEL.write(tmp_path / "checkpoint"), tmp_path / "plain.ingot", tmp_path / "made.ingot"
    compile_model(checkpoint, plain, target="cpu", backend="reference", **LIMITS)
    report = compile_model(checkpoint, made, target="cuda", backend="inductor", **{**LIMITS, "jobs": 4})
    computed = {node.backend for bucket in report.plans.plans["main"].buckets for node in bucket.instructions}
    assert {"inductor", "triton"} <= computed <= {"inductor", "triton", "reference"}
    assert decode_is_capturable(made)
    assert serve(Job(str(made), BATCHES, NEW_TOKENS)).tokens == serve(Job(str(plain), BATCHES, NEW_TOKENS)).tokens


@pytest.mark.slow
def test_every_op_at_any_size_and_in_a_graph(tmp_path: Path) -> None:
    """As near to float64 as the interpreter is, with the promised types and strides; and the same bits captured."""
    every = every_op()
    region = Region(every.body.name, every.body, "inductor")
    with Emitter({"inductor": InductorCuda()}, Target.detect("cuda"), 1) as emitter:
        executable = emitter.emit([region])[region.name]
        assert emitter.measure([region], {"T": T_MAX, "L": L_MAX})[region.name] > 0
    run = load(
        executable,
        Path(shutil.copytree(emitter.folders[executable.id], tmp_path / "moved")),
        on_one_device("cuda"),
    )
    stream = torch.cuda.Stream()
    for tokens, rows in ((1, 1), (2, 2), (7, 7), (64, 3), (T_MAX, L_MAX), (1, L_MAX), (T_MAX, 1)):
        inputs = every.inputs(tokens, rows, seed=tokens)
        args = [moved(inputs[name]) for name in every.body.input_types()]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = dict(zip(every.outputs, run(*args), strict=True))
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            captured = dict(zip(every.outputs, run(*args), strict=True))
            graph.capture_end()
            graph.replay()
            stream.synchronize()
        expected, exact = (interpret(every.body, inputs, exact=wide) for wide in (False, True))
        for name, node in every.outputs.items():
            problem = node.meta["type"].mismatch(found[name], {"T": tokens, "L": rows})
            assert problem is None, f"{name}: {problem}"
            assert torch.equal(found[name], captured[name]), f"{name}: other bits in a graph"
            dtype = next((item for item in DTYPES if name.startswith(str(item).removeprefix("torch."))), None)
            if dtype is not None:
                measured = (Measured(value[name].cpu(), exact[name]) for value in (expected, found))
                problem = breach(Numerics.ROUNDING, *measured, dtype)
                assert problem is None, f"{name}, {tokens} tokens: {problem}"


@pytest.mark.slow
def test_a_region_without_memory_says_so(tmp_path: Path) -> None:
    """By the error that lets the engine compute a sequence later, and once there is memory again it runs."""
    body = parse_program(
        "program wide stage=FUSED\ndim T in [1, 4096]\ninput x: f32[T, 4096]\ninput w: f32[262144, 4096]\n"
        "%y = ingot.linear(%x, %w) : f32[T, 262144]\nreturn y=%y\n"
    )
    with Emitter({"inductor": InductorCuda()}, Target.detect("cuda"), 1) as emitter:
        executable = emitter.emit([Region("wide", body, "inductor")])["wide"]
    run = load(executable, emitter.folders[executable.id], on_one_device("cuda"))
    weight = torch.zeros(262144, 4096, device="cuda")
    few, many = (torch.zeros(tokens, 4096, device="cuda") for tokens in (2, 4096))  # 4 GiB of results for many
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
        with pytest.raises(torch.OutOfMemoryError, match="a compiled region ran out of GPU memory"):
            run(many, weight)
        assert run(few, weight)[0].shape == (2, 262144)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run(many, weight)[0].shape == (4096, 262144)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU, with the strides that it has."""
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return there.copy_(tensor)
