"""Lowerings: what turns a call of an op, or a region, into launches of kernels."""
