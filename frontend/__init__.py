"""The frontend: from a checkpoint folder to a traced model, without loading weights."""
