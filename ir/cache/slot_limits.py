"""How many slots a model has whose states stand once per sequence, beside those of the sequences that run."""

# A sequence that runs keeps the end of its last full page. One that has ended has kept two: of its prompt, and of all
# that it computed. More are of use only to conversations that pause for longer.
KEPT_PER_SEQUENCE = 2
# The prefix cache needs pages and slots together, and the pages of a sequence take more the longer it is.
KEPT_SHARE = 4  # at most one part in so many of the memory that is left for both
