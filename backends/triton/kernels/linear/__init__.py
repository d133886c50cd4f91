"""Matmul kernels for weights in the dtype of x."""
