"""Counts of requests and of the rows and pages that they use at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Counts of the requests that are served now, and of what they use.

    waiting           sequences that wait for a device row or for KV pages
    running           sequences that have a device row: an index in the per-sequence tensors on the device
    steps             steps in flight
    free_rows         device rows without a sequence
    pages_held        KV pages that sequences use
    pages_releasing   KV pages that become free when the steps in flight are complete
    pages_kept        KV pages that the prefix cache can find; sequences may use them too
    pages             all KV pages
    preemptions       how often a sequence was preempted so far
    forced_tokens     output tokens so far that a grammar forced and that needed no step of their own
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
    forced_tokens: int = 0
