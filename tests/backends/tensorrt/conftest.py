"""The double of TensorRT in the place of the package."""

import sys
from collections.abc import Iterator

import fake_tensorrt
import pytest
import torch
from tensorrt_world import GPU, STREAM, World

import ingot.backends.tensorrt.emit as emit_side
import ingot.backends.tensorrt.load as load_side


@pytest.fixture(scope="module")
def machine() -> Iterator[World]:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt.module())
        for side in (emit_side, load_side):
            patch.setattr(side, "product_here", lambda: GPU)
        patch.setattr(load_side, "current_stream", lambda device: STREAM)
        patch.setattr(load_side, "new_tensor", lambda shape, strides, dtype: fake_tensorrt.aligned(shape, dtype))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: world.capturing)
        yield world


@pytest.fixture
def world(machine: World) -> World:
    machine.capturing = False
    machine.calls.clear()
    return machine
