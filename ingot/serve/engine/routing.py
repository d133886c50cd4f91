"""Which replica serves a request: the one that has cached most of its prompt, unless others have much less to do.

A replica finds a cached prefix in its own prefix cache alone. So a conversation goes to the replica that has served its
earlier turns. The router knows the prompts that it sent to each replica, as hashes of their blocks, and no outputs.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ingot.runtime.pages.block_hashes import BlockHashes

# Of longer prompts, only so many blocks are hashed: 32,768 tokens in blocks of 16, which takes 2 ms of a server's core.
MOST_HASHED = 2048
# The hashes that the router keeps for each replica: 2 million tokens in blocks of 16, and 20 MB.
MOST_RECENT = 1 << 17


@dataclass(frozen=True)
class Candidate:
    """A replica that can take a request.

    index   its number
    load    sequences that it has not finished
    blocks  leading blocks of the prompt that it got before
    turn    when it was last chosen; a lower number is earlier
    """

    index: int
    load: int
    blocks: int
    turn: int


def choose(candidates: Collection[Candidate], blocks: int, bound: int) -> int:
    """Return the index of the replica for a prompt of so many blocks.

    A replica is considered if its load exceeds the lowest one by at most `bound` times the share of the prompt that it
    got before. Of these, choose the one with the most blocks, then the lowest load, then the one that waited longest.
    So a prompt without a known prefix goes to a least loaded replica, and a short common prefix draws no load.
    """
    lowest = min(one.load for one in candidates)
    near = [one for one in candidates if (one.load - lowest) * max(blocks, 1) <= bound * one.blocks]
    return max(near, key=lambda one: (one.blocks, -one.load, -one.turn)).index


def hash_blocks(prompt_ids: Sequence[int], cache_salt: str | None, block_size: int) -> list[bytes]:
    """Return the hash of each full block of a prompt, 32 bytes. It covers the salt and all earlier blocks.

    Blocks after the first MOST_HASHED are left out.
    """
    hashes = BlockHashes(block_size, salt=(cache_salt or "").encode())
    return hashes.extend(prompt_ids[: MOST_HASHED * block_size])


class RecentBlocks:
    """The blocks of prompts that one replica got, the least recent of which are dropped.

    `most` is the number of hashes to keep.
    """

    def __init__(self, most: int = MOST_RECENT) -> None:
        self._most = most
        self._recent: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def count(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt are known."""
        low, high = 0, len(hashes)
        while low < high:  # a known block's earlier ones are known too
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._recent:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, hashes: Sequence[bytes], most: int) -> None:
        """Add the blocks of a prompt. Keep at most `most` blocks, the pages of the replica's cache."""
        for one in reversed(hashes):  # the first block is the most recent one, so it is dropped last
            self._recent[one] = None
            self._recent.move_to_end(one)
        while len(self._recent) > min(most, self._most):
            self._recent.popitem(last=False)


class Router:
    """Chooses a replica for each prompt, and remembers the prompts that each of them got.

    replicas     the number of replicas
    block_size   tokens of a block: the page size of the KV cache
    """

    def __init__(self, replicas: int, block_size: int) -> None:
        self._block_size = block_size
        self._recent = [RecentBlocks() for _ in range(replicas)]
        self._turns = [0] * replicas

    def route(
        self, prompt_ids: Sequence[int], cache_salt: str | None, loads: dict[int, int], bound: int, pages: int
    ) -> int:
        """Return the number of the replica that gets a prompt.

        loads   the unfinished sequences of each replica that can take the request, by its number
        bound   as in `choose`
        pages   the KV pages of a replica; 0: not known yet
        """
        hashes = hash_blocks(prompt_ids, cache_salt, self._block_size)
        candidates = [
            Candidate(index, load, self._recent[index].count(hashes), self._turns[index])
            for index, load in loads.items()
        ]
        index = choose(candidates, len(hashes), bound)
        self._recent[index].add(hashes, pages or MOST_RECENT)
        self._turns[index] = max(self._turns) + 1
        return index

    def forget(self, index: int) -> None:
        """Forget the prompts of a replica whose cache has become empty."""
        self._recent[index] = RecentBlocks()
