"""How much shared memory there is for tiles."""

# Shared memory that a block may have, by compute capability (CUDA C++ programming guide, technical specifications).
_SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}


def shared_memory(sm: int) -> int:
    """Bytes that a block may have; on a capability that is not known, those of the one before it."""
    return _SHARED_KB[max((one for one in _SHARED_KB if one <= sm), default=min(_SHARED_KB))] << 10
