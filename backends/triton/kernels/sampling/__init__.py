"""Kernels from logits to tokens."""
