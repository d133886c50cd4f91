"""Regions by TensorRT on a GPU: right at every size, in graphs of several sizes, and a model served from engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from every_op import L_MAX, T_MAX, check_samples, every_op
from frozen_serve import Job, serve
from gpu_model import LIMITS, MODEL
from onnx_cases import WITHOUT

from ingot import compile_model
from ingot.backends.tensorrt.emit import Tensorrt
from ingot.backends.tensorrt.load import load
from ingot.compile.emitter import Emitter
from ingot.ir.artifact.record import Numerics
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.program import Region
from ingot.runtime.loading.load_context import on_one_device

# The builder times kernels for each layer.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tensorrt,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("tensorrt_on_a_gpu"),
]
SIZES = ((1, 1), (7, 7), (64, 3), (T_MAX, L_MAX))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_op_at_any_size_and_in_graphs(dtype: torch.dtype, tmp_path: Path) -> None:
    """Near to float64 as the interpreter is. Graphs of all sizes are captured first and replayed afterwards, so a graph
    that depends on the later state of a context gives other numbers."""
    every = every_op([dtype], without=WITHOUT)
    with Emitter({"tensorrt": Tensorrt()}, Target.detect("cuda"), 1) as emitter:
        region = Region(every.body.name, every.body, "tensorrt")
        executable = emitter.emit([region])[region.name]
        assert emitter.measure([region], {"T": T_MAX, "L": L_MAX})[region.name] > 0
    folder = Path(shutil.copytree(emitter.folders[executable.id], tmp_path / "moved"))
    run, stream, kept = load(executable, folder, on_one_device("cuda")), torch.cuda.Stream(), []
    for tokens, rows in SIZES:
        inputs = every.inputs(tokens, rows, seed=tokens)
        args = [_moved(inputs[name]) for name in every.body.input_types()]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = [one.clone() for one in run(*args)]
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            captured = run(*args)
            graph.capture_end()
        kept.append((tokens, rows, inputs, args, found, graph, captured))
    for tokens, rows, inputs, _, found, graph, captured in kept:
        with torch.cuda.stream(stream):
            graph.replay()
            stream.synchronize()
        plain, exact = (interpret(every.body, inputs, exact=wide) for wide in (False, True))
        for (name, node), one, again in zip(every.outputs.items(), found, captured, strict=True):
            problem = node.meta["type"].mismatch(one, {"T": tokens, "L": rows})
            assert problem is None, f"{name}: {problem}"
            assert torch.equal(one, again), f"{name}, {tokens} tokens: other bits in a graph"
            right = exact[name]
            problem = breach(Numerics.ROUNDING, Measured(plain[name], right), Measured(one.cpu(), right), one.dtype)
            assert problem is None, f"{name}, {tokens} tokens: {problem}"
    check_samples(every, dict(zip(every.outputs, kept[0][4], strict=True)))


def test_a_model_is_served_from_engines(tmp_path: Path) -> None:
    checkpoint, plain, made = MODEL.write(tmp_path / "checkpoint"), tmp_path / "plain.ingot", tmp_path / "made.ingot"
    batches = [[[7]], [list(range(1, 40))], [[n, n + 1, 3] for n in range(5)]]
    compile_model(checkpoint, plain, target="cpu", backend="reference", **LIMITS)
    report = compile_model(checkpoint, made, target="cuda", backend="tensorrt", **{**LIMITS, "jobs": 2})
    assert report.nodes_per_backend["tensorrt"] > 0
    served = serve(Job(str(made), batches, 12))
    assert served.tokens == serve(Job(str(plain), batches, 12)).tokens and served.graphs


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU, with the strides that it has."""
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return there.copy_(tensor)
