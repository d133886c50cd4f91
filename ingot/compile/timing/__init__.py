"""Measure times during a compile: of tile sizes, and of the backends of calls."""
