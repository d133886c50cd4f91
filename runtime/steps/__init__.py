"""The steps of a model: inputs, executors, outputs."""
