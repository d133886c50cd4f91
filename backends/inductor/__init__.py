"""The inductor backend: regions compiled ahead of time by AOTInductor."""
