"""Lowerings: they turn a call of an op, or a region, into kernel launches."""
