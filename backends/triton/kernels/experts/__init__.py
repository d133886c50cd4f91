"""Kernels of mixtures of experts: routers, and the matmuls of the chosen experts."""
