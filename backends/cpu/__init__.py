"""The cpu backend: our own C++ kernels for what torch has no fast op for, the paged KV cache above all."""
