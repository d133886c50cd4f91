"""The routes of the HTTP server, one file for each group of paths."""
