"""Passes, which rewrite programs, the pipeline, and the pass manager."""
