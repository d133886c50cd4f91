"""The serving side of the front door: `LLM`, and the engine that it sets up. It imports no compiler."""
