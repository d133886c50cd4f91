"""The reference backend: every op by its reference implementation."""
