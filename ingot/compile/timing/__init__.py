"""Times measured while compiling: of tile sizes, and of the backends of calls."""
