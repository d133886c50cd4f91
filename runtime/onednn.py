"""What oneDNN, torch's library for products in bfloat16 on a CPU, may keep of the code that it writes.

It writes code for each shape that it meets, and a served step has any number of tokens. oneDNN keeps that of the last
1024 shapes, and ideep, torch's layer above it, once more as many: some 0.55 MB a shape were measured, so that hours of
serving hold half a gigabyte that no plan counts. To write it again takes a quarter of a millisecond, which was not to
be seen in the processor's time of requests of random lengths.
"""

import os

# The names: oneDNN's page "Primitive Cache", and LRU_CACHE_CAPACITY in ideep's lru_cache.hpp (pytorch/pytorch#27971).
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Some ten shapes of weights, with the dozen numbers of tokens that steps have which decode.
_SHAPES = 128


def bound_code_caches() -> None:
    """Let both keep that many, unless the environment says another number. They ask once, when they first run; in a
    process that has multiplied before it changes nothing."""
    for name in _CAPACITIES:
        os.environ.setdefault(name, str(_SHAPES))
