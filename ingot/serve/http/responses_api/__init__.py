"""OpenAI's Responses API: its requests, its answers, its events, and the store of answers."""
