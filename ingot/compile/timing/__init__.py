"""Time kernels' tile sizes and calls' backends during a compile, to choose the fastest."""
