"""How much shared memory a thread block may have, by compute capability."""

# KB of shared memory that a block may have (CUDA C++ programming guide, technical specifications).
_SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}


def shared_memory(sm: int) -> int:
    """Return the bytes of shared memory that a thread block may have on compute capability `sm`.

    An unknown capability counts as the next lower known one.
    """
    return _SHARED_KB[max((one for one in _SHARED_KB if one <= sm), default=min(_SHARED_KB))] << 10
