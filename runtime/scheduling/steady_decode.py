"""The scheduler's fast path for sequences that decode one token per step.

A sequence is on the fast path while `num_computed < decodes_until`. Until then the scheduler need not check it: the
step in flight samples exactly one token for it, its device row holds that token and position, its pages have room for
the next token, and its length limit is not reached. So the next step feeds the token of the step before. Every event
that breaks one of these conditions sets `decodes_until` to 0: exhausted pages or length, preemption, a withdrawn step.
A sequence with drafts is never on the fast path, because the number of tokens per step is unknown.
"""

from collections.abc import Sequence

from ingot.runtime.scheduling.request import Request


def steady(running: Sequence[Request]) -> list[Request]:
    """Return the running sequences on the scheduler's fast path. Each decodes one token in the next step, and the
    scheduler does not check it."""
    return [one for one in running if one.num_computed < one.decodes_until]


def others(running: Sequence[Request], *, in_flight: bool) -> list[Request]:
    """Return the running sequences that the scheduler must check one by one, because they are not on its fast path. If
    no step is in flight, return all running sequences."""
    return [one for one in running if not in_flight or one.num_computed >= one.decodes_until]


def enter(request: Request, tokens_held: int) -> None:
    """Put a sequence on the scheduler's fast path: it decodes one token per step, and the scheduler does not check it.
    The step in flight must sample one token for it.

    It leaves the fast path at `tokens_held` tokens, when it needs another page, or at its length limit.
    """
    request.decodes_until = min(tokens_held, request.max_total - 1)


def leave(request: Request) -> None:
    """Take a sequence off the scheduler's fast path: the scheduler checks it in the next step."""
    request.decodes_until = 0
