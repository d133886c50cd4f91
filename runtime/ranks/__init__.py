"""Serving on a mesh: a process for each rank, with one scheduler in the process of rank 0."""
