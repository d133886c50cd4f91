"""Matmul kernels for quantized weights."""
