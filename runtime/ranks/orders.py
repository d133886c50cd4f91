"""Orders of rank 0 to the other ranks of a mesh, one byte each, and how often ranks report that they run."""

# Run the next step; run the ending of the step before, whose late inputs are there now. Closing the pipe ends a rank.
STEP, ENDING = b"S", b"E"
BEAT_SECONDS = 0.5
