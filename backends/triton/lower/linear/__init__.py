"""Lowerings of matmuls with weights in the dtype of x, and their tile sizes."""
