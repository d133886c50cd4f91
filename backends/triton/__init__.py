"""The triton backend: kernels compiled to cubins at compile time, launched through the CUDA driver at run time."""
