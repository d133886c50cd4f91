"""The engines: requests in, outputs out."""
