"""The resources that requests occupy at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Counts of requests and of the resources that they use.

    waiting, running   sequences
    steps              steps in flight
    free_rows          device rows without a sequence
    pages_held         KV pages that sequences hold
    pages_releasing    KV pages that become free when the steps in flight retire
    pages_kept         KV pages that the prefix cache finds, held or not
    pages              all KV pages
    preemptions        preemptions so far
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
