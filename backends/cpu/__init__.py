"""The cpu backend: C++ kernels for ops that torch has no fast op for, above all those on the paged KV cache."""
