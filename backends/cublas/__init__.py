"""The cublas backend: matmuls by the library that comes with torch."""
