"""Times measured while compiling: of tile sizes, and of the providers of calls."""
