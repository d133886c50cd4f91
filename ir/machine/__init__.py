"""The machine that is compiled for and loaded on: targets, GPUs by name, what their kernels take."""
