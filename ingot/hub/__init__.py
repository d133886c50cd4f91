"""Checkpoints by name on the Hugging Face hub: find them, download them into the hub's own cache, open them there."""
