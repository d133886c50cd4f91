"""Serving on a GPU: executor, CUDA graphs, weight copies, and memory."""
