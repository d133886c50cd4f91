"""Limits on the slots of per-sequence states in addition to those of running sequences."""

# A running sequence keeps the state at the end of its last full page. An ended one has kept two: that of its prompt,
# and that of all its tokens. More are useful only for conversations that pause for longer.
KEPT_PER_SEQUENCE = 2
# The prefix cache needs pages and slots together, and a longer sequence needs more memory for pages.
KEPT_SHARE = 4  # slots take at most 1 / KEPT_SHARE of the memory left for both
