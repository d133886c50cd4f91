"""Model definitions: the blocks that they consist of, the readers of config.json, and the table of architectures."""
