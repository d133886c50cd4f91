"""Attention kernels over paged caches and over the tokens of a step."""
