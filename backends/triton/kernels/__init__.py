"""Triton kernels: `triton.jit` functions and the constants that they are compiled for."""
