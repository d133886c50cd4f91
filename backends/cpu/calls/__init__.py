"""The ops of the cpu backend as Python functions, which pass pointers, sizes and strides to the C++ kernels."""
