"""Serve artifacts: `LLM`, `AsyncLLM` and the HTTP server. Nothing here imports a compiler."""
