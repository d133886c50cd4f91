"""Lowerings: each turns a call of an op, or a region of calls, into launches of Triton kernels."""
