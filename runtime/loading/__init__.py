"""Opening and loading of an artifact: checks, executables, weights, states and memory."""
