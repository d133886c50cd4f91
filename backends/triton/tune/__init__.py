"""Tuning: times kernels with different tile sizes on a GPU. Compiling with given tile sizes imports none of this."""
