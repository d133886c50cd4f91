"""Tuning: time tile sizes on a GPU. The code emitted for given sizes does not depend on these modules."""
