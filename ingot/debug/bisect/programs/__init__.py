"""Compare the programs of a compile with the meaning of the traced one: passes, rewrites, the definition."""
