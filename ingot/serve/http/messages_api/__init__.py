"""Anthropic's Messages API: its requests, its answers and its events."""
