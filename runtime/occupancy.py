"""Counts of requests and of the rows and pages that they use at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Counts of the requests that are served now, and of the resources that they use.

    waiting           sequences that wait for a device row or for KV pages
    running           sequences that are being processed: each has a device row (an index in the per-sequence tensors)
    steps             steps in flight
    free_rows         device rows without a sequence
    pages_held        KV pages that sequences use
    pages_releasing   KV pages that become free when the steps in flight are complete
    pages_kept        KV pages that the prefix cache can find, in use by a sequence or not
    pages             all KV pages
    preemptions       how often sequences were preempted so far
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
