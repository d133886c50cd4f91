"""The nccl backend: connects GPUs of one machine, and computes the collectives of a mesh of them."""
