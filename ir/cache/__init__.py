"""KV caches: dtypes, forms, groups, scratch pages, and the memory for pages and slots."""
