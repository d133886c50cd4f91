"""Serve the requests of a file: `ingot run-batch`, with files in the form of OpenAI's batches."""
