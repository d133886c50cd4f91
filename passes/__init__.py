"""The passes, which rewrite programs; the pipeline, which orders them; the manager, which runs and records them."""
