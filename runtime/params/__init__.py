"""Checked parameters of requests."""
