"""The cublas provider: matrix products by the library that comes with torch."""
