"""The cublas backend: matrix products by the library that comes with torch."""
