"""Timing of tile sizes on a GPU. What is emitted for given sizes does not depend on it."""
