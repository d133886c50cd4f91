"""Structured output: grammars that the generated text must match, by the library llguidance."""
