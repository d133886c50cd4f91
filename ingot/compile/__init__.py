"""The compile side: a checkpoint and its options become an artifact. Nothing that serves imports it."""
