"""The C++ kernels as the ops that they compute: pointers, sizes and strides of torch tensors. Run side."""
