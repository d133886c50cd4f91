"""Compile a checkpoint with its options into an artifact. Serving imports nothing from here."""
