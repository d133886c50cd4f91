"""Serving: load an artifact, schedule requests, run their steps, and return tokens or vectors."""
