"""A served model in Ray Serve: deployments, and a router by common prefixes. It needs `ingot[ray]`."""
