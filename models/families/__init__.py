"""Readers of config.json by model family: each returns block specs. One file has the readers of related families."""
