"""Chat templates: conversations become prompts, rendered in a sandboxed process."""
