"""Measuring on a mesh: every rank records when its calls, its collectives and its transfers begin and end."""
