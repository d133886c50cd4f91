"""What requests take up at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Of requests and of what they are served with.

    waiting, running   sequences
    steps              in flight
    free_rows          device rows that no sequence has
    pages_held         KV pages that a sequence holds
    pages_releasing    those that become free when the steps in flight have retired
    pages_kept         those that the prefix cache finds, held or not
    pages              all that there are
    preemptions        how often a sequence has lost its pages so far
    """

    waiting: int
    running: int
    steps: int
    free_rows: int
    pages_held: int
    pages_releasing: int
    pages_kept: int
    pages: int
    preemptions: int
