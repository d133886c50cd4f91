"""The time of a step on a GPU, call by call: its lower bound, its prediction, and its measurement."""
