"""The triton provider: kernels compiled to cubins at compile time, launched through the CUDA driver at run time."""
