"""The triton backend: compiles Triton kernels to cubins ahead of time, and launches them through the CUDA driver."""
