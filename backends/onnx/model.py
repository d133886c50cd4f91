"""Names that both sides of the onnx backend use: element types, the model's file, and its metadata."""

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
