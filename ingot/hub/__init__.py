"""Checkpoints by their names on the Hugging Face hub: found, downloaded into the hub's own cache, opened from there."""
