"""LoRA adapters: reading PEFT folders, and finding the weights of a model that an adapter changes."""
