"""Attention of prompts by the kernels that FlashInfer has, where it is installed."""
