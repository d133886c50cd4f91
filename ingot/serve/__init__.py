"""Serve artifacts: `LLM`, and the engine that it sets up. Nothing here imports a compiler."""
