"""The schedule of the golden run: a few requests, in steps that reach each bucket class and cross a page boundary."""

from collections.abc import Mapping, Sequence

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.numerics.harness import Schedule

_REQUESTS = 3
# Enough to mix sequences of different lengths in one step. For a large model, every step reads all weights.
_DECODE_STEPS = 3
# Tokens of each short prompt: less than any page, and no power of two.
_SHORT = 5
# The maximum tokens of a chunk, unless a bucket class needs more: two pages of 16.
_MOST_FED = 32


def golden_schedule(buckets: Sequence[BucketClass], max_seq_len: int, max_batch: int, page_size: int) -> Schedule:
    """Return the steps of the golden run. They reach each bucket class (range of step sizes) and cross a page boundary.

    A step is a list of pairs: (index of a request, number of its next tokens that the step takes). The first step runs
    in the largest bucket class, with a prompt that crosses a page boundary and a short prompt. Each smaller class has a
    step in which the first request continues while others start or decode. In the last steps, all requests decode.

    A step has at most `_MOST_FED` tokens, unless its class requires more. A class that limits the tokens of one
    sequence needs more requests. A class that the limits `max_seq_len` and `max_batch` cannot fill gets no step.
    """
    needed = sum(bucket.tokens[0] for bucket in buckets)
    together = max(-(-bucket.tokens[0] // bucket.q_max) if bucket.q_max else 1 for bucket in buckets)
    steps = _Steps(max_seq_len, min(max_batch, max(_REQUESTS, -(-needed // max_seq_len), together)))
    descending = sorted(buckets, key=lambda bucket: (-bucket.tokens[0], bucket.q_max is not None))
    steps.prefill(descending[0], [page_size + 1, _SHORT])
    for bucket in descending[1:] or descending:
        steps.prefill(bucket, [2 * page_size - 1 - steps.done[0], 1, 1])
    for _ in range(_DECODE_STEPS):
        steps.decode(buckets)
    return steps.fed


class _Steps:
    """Collects the steps of a schedule in `fed`. `done` is the number of tokens that each request has taken so far."""

    def __init__(self, max_seq_len: int, requests: int) -> None:
        self.max_seq_len = max_seq_len
        self.done = [0] * requests
        self.fed: list[list[tuple[int, int]]] = []

    def prefill(self, bucket: BucketClass, wanted: Sequence[int]) -> None:
        """Add a step that runs in the bucket class (range of step sizes) `bucket`.

        Request i takes up to `wanted[i]` tokens. If the class requires more tokens, requests take more than wanted. If
        they have too few, no step is added.
        """
        least, most = bucket.tokens[0], min(bucket.tokens[1], max(bucket.tokens[0], _MOST_FED))
        counts = dict.fromkeys(range(len(self.done)), 0)
        # First the wanted tokens, with room left to decode; then, up to the class's minimum, any request with room.
        for goal, ends, kept in ((wanted, most, _DECODE_STEPS), ([least] * len(counts), least, 0)):
            for index, want in zip(counts, goal, strict=False):
                room = min(
                    want - counts[index],
                    ends - sum(counts.values()),
                    self.max_seq_len - kept - self.done[index] - counts[index],
                    (bucket.q_max or want) - counts[index],
                )
                counts[index] += max(room, 0)
        if sum(counts.values()) >= max(least, 1):
            self._feed(counts)

    def decode(self, buckets: Sequence[BucketClass]) -> None:
        """Add one token for every request that is shorter than `max_seq_len`.

        The tokens form one step if one of `buckets` allows so many sequences. Otherwise each request has a step.
        """
        open_requests = [index for index, done in enumerate(self.done) if done < self.max_seq_len]
        together = any(bucket.holds(len(open_requests), 1) for bucket in buckets)
        for batch in [open_requests] if together else [[index] for index in open_requests]:
            self._feed(dict.fromkeys(batch, 1))

    def _feed(self, counts: Mapping[int, int]) -> None:
        if fed := [(index, count) for index, count in counts.items() if count]:
            self.fed.append(fed)
        for index, count in counts.items():
            self.done[index] += count
