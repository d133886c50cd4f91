"""Lowerings of matmuls with quantized weights, and their tile sizes."""
