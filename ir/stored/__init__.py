"""Recipe steps and recipes that read the tensors of quantized checkpoints."""
