"""What the golden run feeds: a few requests, in steps that reach every bucket class, page borders and later chunks."""

from collections.abc import Mapping, Sequence

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.numerics.harness import Schedule

_REQUESTS = 3
# Enough to mix sequences of unequal age in one step; of a large model every step reads all weights.
_DECODE_STEPS = 3
# Tokens of a prompt beside the long one: less than any page, and no power of two.
_SHORT = 5
# A chunk's tokens at most where a bucket class does not ask for more: two pages of 16.
_MOST_FED = 32


def golden_schedule(buckets: Sequence[BucketClass], max_seq_len: int, max_batch: int, page_size: int) -> Schedule:
    """Steps of at least one token each. Requests are numbered from 0 and have as many tokens as they are fed.

    The largest bucket class comes first: a prompt that crosses a page border with a short one beside it. In smaller
    classes the first goes on, up to the end of a page where that fits, while the others decode or start; at the end all
    decode. A class is reached by at most `_MOST_FED` tokens or as many as its smallest step has, and one that bounds
    the tokens of a sequence by as many requests more as that takes; one for which the limits leave no tokens is left
    out.
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
    """Steps so far; `done` counts each request's tokens."""

    def __init__(self, max_seq_len: int, requests: int) -> None:
        self.max_seq_len = max_seq_len
        self.done = [0] * requests
        self.fed: list[list[tuple[int, int]]] = []

    def prefill(self, bucket: BucketClass, wanted: Sequence[int]) -> None:
        """Feed request i up to `wanted[i]` tokens, and more where the class begins above; no step if it cannot."""
        least, most = bucket.tokens[0], min(bucket.tokens[1], max(bucket.tokens[0], _MOST_FED))
        counts = dict.fromkeys(range(len(self.done)), 0)
        # First what is wanted, with room left to decode; then, for a class that begins above, whatever has room.
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
        """A token of every request that has room, in one step where a class holds that many, else one by one."""
        open_requests = [index for index, done in enumerate(self.done) if done < self.max_seq_len]
        together = any(bucket.holds(len(open_requests), 1) for bucket in buckets)
        for batch in [open_requests] if together else [[index] for index in open_requests]:
            self._feed(dict.fromkeys(batch, 1))

    def _feed(self, counts: Mapping[int, int]) -> None:
        if fed := [(index, count) for index, count in counts.items() if count]:
            self.fed.append(fed)
        for index, count in counts.items():
            self.done[index] += count
