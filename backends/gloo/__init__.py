"""The gloo backend: computes the collectives of a mesh of CPU processes."""
