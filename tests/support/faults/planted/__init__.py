"""Planted faults: bugs put into the compiler from the outside, each with its truth, for measuring what finds them."""
