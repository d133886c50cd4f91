"""KV caches: dtypes, forms, groups, scratch pages, and the memory that pages and slots are shared out of."""
