"""TransMLA (arXiv 2502.07864): grouped-query attention becomes latent attention with one rotated key for all heads."""
