"""Lowerings of mixtures of experts, and their tile sizes."""
