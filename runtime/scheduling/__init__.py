"""The scheduler: which tokens each step computes."""
