"""Lowerings of attention, and its tile sizes."""
