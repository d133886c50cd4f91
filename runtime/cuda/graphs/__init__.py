"""Captured CUDA graphs: the steps that have one, capture, replay, and shared memory."""
