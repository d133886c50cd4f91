"""How sequences are divided among the steps in flight, if pipeline stages compute them.

Each stage has a step of its own with other sequences, and the host prepares one more. When a step is launched,
the first stage has launched the endings of all steps but the newest ones, one fewer than there are stages. So a
sequence may be in the new step if its last token comes from an older one. The stages feed this token on the device, and
the host need not have read it. A prompt is known, so the next chunk of a prompt follows the one before at once.
"""

from collections.abc import Sequence

from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.request import Request


def oldest_without_ending(in_flight: Sequence[StepBatch], stages: int) -> int:
    """Return the number of the oldest step whose ending has not been launched when the next step is.

    in_flight   the steps in flight, oldest first; at least one
    stages      the number of pipeline stages, two or more
    """
    return in_flight[max(0, len(in_flight) - (stages - 1))].step


def waits(request: Request, oldest: int, *, host_knows: bool) -> bool:
    """Return whether a sequence cannot be in the next step, because a token of it in flight comes back too late.

    oldest       the oldest step whose ending has not been launched when the next step is
    host_knows   the next step of the sequence needs its last token on the host; so it does with a grammar, from which
                 come the masks of the next one
    """
    if not request.in_flight:
        return False
    return host_knows or request.matcher is not None or request.sampled_by >= oldest


def most_sequences(stages: int, sequences: int) -> int | None:
    """Return the most sequences of a step if `sequences` of them share the stages; None: any number. Steps of equal
    numbers keep all stages equally busy."""
    return None if stages == 1 else -(-sequences // stages)
