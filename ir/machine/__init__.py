"""The machine to compile for and to load on: targets, GPUs by name, and the times of their kernels."""
