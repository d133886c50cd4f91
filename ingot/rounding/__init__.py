"""The rounding check: whether fusing calls breaks the contract for rounding with the weights of a given checkpoint."""
