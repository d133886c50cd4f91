"""Convert a checkpoint into one of another architecture: grouped-query attention into latent attention (TransMLA)."""
