"""The reference backend: computes every op by its reference implementation."""
