"""The schema of region.json, which describes a TensorRT engine. Both sides of the backend use it."""

from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from ingot.backends.onnx.model import Native

# Files in the executable's folder: the serialized engine, and what it is.
ENGINE, RECORD = "region.engine", "region.json"
# TensorRT multiplies bfloat16 itself, with sums in float32. Sums of a float16 matmul may be in float16, unless its
# operands are cast to float32: a pattern that TensorRT recognizes (its developer guide, "Control of Computational
# Precision"). A matmul with a bias has such casts too, so that it rounds once.
NATIVE = Native(products=frozenset({torch.bfloat16}), moves=frozenset({torch.bfloat16, torch.float16}))
# Addresses of tensors and of memory that an engine gets are multiples of this (`setTensorAddress` in
# NvInferRuntime.h).
ALIGNMENT = 256


class Record(BaseModel):
    """An engine and how to call it.

    tensorrt  the version of TensorRT that built it: only this version reads it
    gpu       the name of the GPU model that it was built on: an engine is tuned for one model
    inputs    the names of its inputs, in the order of the region's inputs
    results   how the region's results are made of its outputs (`ingot.backends.onnx.results.read_results`)
    memory    the bytes of device memory that a call needs besides inputs and outputs
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    tensorrt: str
    gpu: str
    inputs: tuple[str, ...]
    results: tuple[dict[str, Any], ...]
    memory: Annotated[int, Field(ge=0)]
