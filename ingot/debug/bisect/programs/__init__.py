"""The programs of a compile against what the traced one means: passes, rewrites, the definition."""
