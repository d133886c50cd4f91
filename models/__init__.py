"""Model definitions, their weight maps and sharding plans, and the architecture table."""
