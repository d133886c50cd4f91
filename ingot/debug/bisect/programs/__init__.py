"""Find the pass, rewrite, node or definition that changes what a model's programs compute."""
