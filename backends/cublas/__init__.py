"""The cublas backend: computes matmuls on GPUs with the cuBLAS library that comes with torch."""
