"""Limits on the saved copies of per-sequence states (convolution, scan) that the prefix cache keeps."""

# Copies for each sequence that can run at once. A running one keeps its state at the end of its last full page. An
# ended one has kept two: after its prompt and after all its tokens. More help only conversations that pause for longer.
KEPT_PER_SEQUENCE = 2
# The prefix cache needs pages and slots together, and a longer sequence needs more memory for pages.
KEPT_SHARE = 4  # slots take at most 1 / KEPT_SHARE of the memory left for both
