"""A machine with the double of TensorRT: what it was told, a layer to compile, and its inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_tensorrt
import torch
from onnx_cases import Run

from ingot.backends.tensorrt.emit import Tensorrt
from ingot.backends.tensorrt.load import load
from ingot.ir.artifact.plan import Executable
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.runtime.loading.load_context import on_one_device

TARGET = Target.named("sm_90")
GPU = "NVIDIA H200"
STREAM = 7


@dataclass
class World:
    """A machine with the double of TensorRT and a GPU, whose memory is the host's."""

    capturing: bool = False

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        return fake_tensorrt.CALLS

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [one for one in self.calls if one[0] in names]


def backend() -> Tensorrt:
    return Tensorrt(missing=lambda target: "")


def emitted(body: Program, folder: Path) -> tuple[Executable, Run]:
    executable = backend().emit(body, "key", TARGET, folder)
    return executable, load(executable, folder, on_one_device("cpu"))


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address that TensorRT takes; gaps stay."""
    if not tensor.is_contiguous():
        return tensor
    made: torch.Tensor = fake_tensorrt.aligned(tensor.shape, tensor.dtype)
    return made.copy_(tensor)


LAYER = """\
program layer stage=FUSED
dim T in [2, 16]
input x: bf16[T, 16]
input residual: bf16[T, 16]
input norm: bf16[16]
input weight: bf16[24, 16]
input bias: bf16[24]
input plain: bf16[8, 16]
input positions: i32[T]
input table: f32[32, 8]
%both = ingot.add_rms_norm(%x, %residual, %norm, eps=1e-05) : (bf16[T, 16], bf16[T, 16])
%normed = getitem(%both, 0) : bf16[T, 16]
%all = ingot.linear(%normed, %weight, %bias) : bf16[T, 24]
%q = aten.slice.Tensor(%all, 1, 0, 16) : bf16[T, 16; 24, 1]
%v = aten.slice.Tensor(%all, 1, 16, 24) : bf16[T, 8; 24, 1]
%heads = aten.view.default(%q, [-1, 2, 8]) : bf16[T, 2, 8; 24, 8, 1]
%turned = ingot.rope(%heads, %positions, %table) : bf16[T, 2, 8]
%gate = ingot.linear(%normed, %plain) : bf16[T, 8]
return q=%turned, v=%v, gate=%gate
"""


def layer_inputs(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for name, value_type in parse_program(LAYER).input_types().items():
        shape = value_type.bind({"T": tokens})
        if name == "positions":
            inputs.append(torch.randint(0, 32, shape, generator=generator, dtype=torch.int32))
        else:
            inputs.append(torch.randn(shape, generator=generator).to(value_type.dtype))
    return [on_device(one) for one in inputs]
