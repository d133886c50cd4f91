"""KV caches: their dtypes, shapes, groups of equal lifetime and scratch pages, and the memory that they need."""
