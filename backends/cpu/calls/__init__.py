"""The run side of the C++ kernels: the ops as Python functions that pass pointers, sizes and strides of tensors."""
