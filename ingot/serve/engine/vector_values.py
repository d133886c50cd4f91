"""The elements of a vector as bytes, in messages between the processes: float32, little-endian."""

import sys
from array import array

from ingot.serve.engine.messages import Vector


def vector_bytes(values: "array[float]") -> bytes:
    """Return the bytes of float32 elements (an array of type "f"), for a message."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def vector_values(vector: Vector) -> list[float]:
    """Return the elements of a vector; none if the request ended with an error."""
    values = array("f", vector.values)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
