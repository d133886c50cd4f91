"""How sequences are divided among the steps in flight, if pipeline stages compute them.

Each stage has a step of its own, so there are as many steps in flight as stages, and each has other sequences. The next
step of a sequence needs the token of its step before, which comes back from the last stage. So a sequence with a token
in flight waits. A prompt is known, so the next chunk of a prompt follows the one before at once.
"""

from ingot.runtime.scheduling.request import Request


def waits(request: Request, stages: int) -> bool:
    """Return whether the next step of a sequence needs a token that comes back from the last of `stages` stages."""
    return stages > 1 and request.in_flight > 0


def most_sequences(stages: int, sequences: int) -> int | None:
    """Return the most sequences of a step if `sequences` of them share the stages; None: any number. Steps of equal
    numbers keep all stages equally busy."""
    return None if stages == 1 else -(-sequences // stages)
