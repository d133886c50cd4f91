"""Checkpoints by name on the Hugging Face hub: find a repository, and download its files into the hub's own cache."""
