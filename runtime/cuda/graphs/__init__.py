"""Captured CUDA graphs: which steps have one, capture and replay, and the memory that they share."""
