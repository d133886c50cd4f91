"""Readers of quantized checkpoints: one module for each method, the `quant_method` of a config.json."""
