"""The time of a step on a mesh: of each call on each rank, of its collectives, and of waiting."""
