"""Serving on a CPU: executor and memory."""
