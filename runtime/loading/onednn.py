"""Bounds for the code caches of oneDNN, torch's library for bfloat16 matmuls on a CPU.

oneDNN generates code for each new shape, and a served step may have any number of tokens. oneDNN caches the code of the
last 1024 shapes, and ideep, torch's layer above it, as many again. Measured at some 0.55 MB per shape, hours of serving
hold half a gigabyte that no plan counts. Generating code again takes a quarter of a millisecond. In the CPU time of
requests of random lengths, that cost was not measurable.
"""

import os

# The names: oneDNN's page "Primitive Cache", and LRU_CACHE_CAPACITY in ideep's lru_cache.hpp (pytorch/pytorch#27971).
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Some ten weight shapes, times the dozen token counts of decode steps.
_SHAPES = 128


def bound_code_caches() -> None:
    """Limit the caches of generated code in oneDNN and ideep to 128 shapes each. Environment variables set the limits,
    and values that the user has set stay. Call it before the first matmul: the libraries read the variables once."""
    for name in _CAPACITIES:
        os.environ.setdefault(name, str(_SHAPES))
