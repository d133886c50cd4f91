"""The fast path of one kind of step: sequences that decode one token a step, while the same ones run.

A sequence is on it as long as `num_computed < decodes_until`. Until then this holds, and nothing has to be looked at:
a step in flight takes exactly one token for it, its row on the device knows that token and its position, its pages hold
the next one, and its length ends no sooner. So the next step feeds the token that the step before it gives. What breaks
one of these sets `decodes_until` to 0: pages or length used up, preemption, a step that was taken back. A sequence that
feeds drafts is never on the fast path, since it is not known how many tokens a step takes for it.
"""

from collections.abc import Sequence

from ingot.runtime.request import Request


def steady(running: Sequence[Request]) -> list[Request]:
    """The sequences on the fast path, which feed one token each."""
    return [one for one in running if one.num_computed < one.decodes_until]


def others(running: Sequence[Request], *, in_flight: bool) -> list[Request]:
    """The sequences to be looked at. Without a step in flight no sequence is on the fast path."""
    return [one for one in running if not in_flight or one.num_computed >= one.decodes_until]


def enter(request: Request, tokens_held: int) -> None:
    """Put a sequence on the fast path, for which the step in flight takes one token. Its pages hold so many tokens."""
    request.decodes_until = min(tokens_held, request.max_total - 1)


def leave(request: Request) -> None:
    """Take a sequence off the fast path: the next step looks at it."""
    request.decodes_until = 0
