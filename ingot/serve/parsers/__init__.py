"""Parsers of generated text: they separate content, reasoning and tool calls while the text arrives."""
