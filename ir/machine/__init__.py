"""The machine to compile for and to load on: targets, facts of GPUs, and the times of their kernels."""
