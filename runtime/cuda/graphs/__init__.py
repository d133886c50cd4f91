"""CUDA graphs of steps: which steps have one, when they are captured, how they are replayed, and their memory."""
