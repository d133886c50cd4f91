"""Kernels: `triton.jit` functions and nothing else."""
