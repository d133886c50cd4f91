"""Running on a CUDA GPU."""
