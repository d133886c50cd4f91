"""Readers of config.json by model family: each returns the spec of a decoder. A file has the readers of one family,
or of several related ones."""
