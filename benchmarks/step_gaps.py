"""The seconds between decode steps of an engine. It needs plain Python only, so that other engines can be measured."""

import time
from collections.abc import Callable, Iterator, Sized


def step_gaps(step: Callable[[], Sized], unfinished: Callable[[], bool], sequences: int) -> Iterator[float]:
    """Run steps until all requests have ended, and yield the seconds between two in which all `sequences` decode.

    `step` runs a step and returns the outputs that it has changed. `unfinished` returns whether requests are left.
    """
    last = None
    while unfinished():
        if len(step()) != sequences:  # some are not decoding yet, or any more
            last = None
            continue
        now = time.perf_counter()
        if last is not None:
            yield now - last
        last = now
