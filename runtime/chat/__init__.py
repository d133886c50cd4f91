"""Chat templates: they render conversations to prompts, in a sandboxed process."""
