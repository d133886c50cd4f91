"""Lowerings of ops from logits to tokens."""
