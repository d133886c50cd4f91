"""GGUF files as checkpoints: their weights, configuration and tokenizer."""
