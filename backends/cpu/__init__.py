"""The cpu backend: C++ kernels for ops that torch does not compute fast, above all ops on the paged KV cache."""
