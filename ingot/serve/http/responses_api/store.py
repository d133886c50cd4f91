"""The store of responses, from which a request continues a conversation. It is in memory and bounded."""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

from ingot.runtime.chat.messages import Message

# Bytes of one owner's responses. A conversation of 128k tokens has half a megabyte, and each turn of it counts in full.
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    content    the response as JSON
    messages   the conversation up to its answer, without instructions, in the form of chats
    """

    content: bytes
    messages: tuple[Message, ...]

    @cached_property
    def size(self) -> int:
        """Return the bytes of the response and of its conversation. Turns share messages, which count for each."""
        return len(self.content) + sum(
            sys.getsizeof(message) + sys.getsizeof(message["content"]) for message in self.messages
        )


class _Shelf:
    """The responses of one owner, least recently used first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0

    def remove(self, response_id: str) -> bool:
        """Remove a response. Return whether it was there."""
        removed = self.responses.pop(response_id, None)
        if removed is not None:
            self.size -= removed.size
        return removed is not None


class ResponseStore:
    """Responses by owner and id. Each owner has `most` responses and MAX_BYTES bytes at most; the least recently used
    ones are dropped. An owner is the name of an API key in `Guard`. No owner sees the responses of another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shelves: dict[str, _Shelf] = {}

    @property
    def enabled(self) -> bool:
        """Return whether the store keeps any responses."""
        return self._most > 0

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Add a response, and drop old ones of the same owner if there are too many."""
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.remove(response_id)
        shelf.responses[response_id] = response
        shelf.size += response.size
        while len(shelf.responses) > self._most or shelf.size > MAX_BYTES:
            shelf.remove(next(iter(shelf.responses)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None if the owner has none of this id."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response. Return whether the owner had it."""
        shelf = self._shelves.get(owner)
        return shelf is not None and shelf.remove(response_id)
