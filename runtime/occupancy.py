"""Counts of requests and of the rows and pages that they use at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Counts of requests and of the resources that they use.

    waiting            sequences that wait for a row or pages
    running            sequences with a device row
    steps              steps in flight
    free_rows          device rows without a sequence
    pages_held         KV pages that sequences hold
    pages_releasing    KV pages that become free when the steps in flight retire
    pages_kept         KV pages that the prefix cache can find, held by a sequence or not
    pages              all KV pages
    preemptions        how often a sequence was preempted so far
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
