"""The time of a step, call by call: its lower bound, its prediction, and its measurement."""
