"""Numbers compared: tolerances, contracts of passes, and the harness that drives programs for both."""
