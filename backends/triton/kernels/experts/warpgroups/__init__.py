"""The kernel of experts of many tokens on Hopper, whose warpgroups multiply or copy."""
