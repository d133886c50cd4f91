"""Names that both sides of the onnx backend use: element types, the model's file, and its metadata.

The tensorrt backend uses them too.
"""

from dataclasses import dataclass

import torch

MODEL = "region.onnx"
# The key of the model's metadata that says how results are made of the model's outputs.
RESULTS = "ingot.results"
# Element types of ONNX (the enum TensorProto.DataType in onnx.proto).
ELEMENTS = {
    torch.float32: 1,
    torch.int32: 6,
    torch.int64: 7,
    torch.float16: 10,
    torch.bfloat16: 16,
}
FLOAT = ELEMENTS[torch.float32]
# ONNX Runtime's CPU has no Add or MatMul of bfloat16, and few ops of float16. Both are computed in float32.
NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Native:
    """The 16-bit dtypes that the runtime of a model handles itself. All other work is in float32, with casts.

    products  of matmuls: operands and results have the dtype, sums are wider
    moves     of ops that only move numbers, such as slices
    """

    products: frozenset[torch.dtype] = frozenset()
    moves: frozenset[torch.dtype] = frozenset()


IN_FLOAT32 = Native()
