"""Hashes of token blocks, under which sequences with equal prefixes share KV pages.

A block's KV depends on its tokens and on all tokens before them, so its hash covers the hash of its parent block:

    root     = SHA-256(TAG, block size u32, length of salt u64, salt)
    block i  = SHA-256(hash of block i - 1 or root, token ids u32 each, for each extra key: its length u64, the key)

All integers are little-endian, and every part has a fixed or stated length, so different contents have different
encodings. The hash is SHA-256, not a faster one: an attacker who can make two blocks collide reads another request's
cache. The salt separates tenants. Without it, response times would reveal that another tenant has sent the same prompt.
"""

import copy
import hashlib
import struct
from collections.abc import Iterable, Sequence

from ingot.ir.errors import InternalError
from ingot.runtime.params.given_numbers import as_integer

TAG = b"ingot block hashes 1"
MAX_TOKEN = 2**32 - 1
_TOKEN_BYTES = 4


class BlockHashes:
    """The hashes of a sequence's full blocks of tokens, by which the prefix cache finds KV pages. `extend` adds tokens.

    block_size   tokens in a block
    salt         bytes that change all hashes: only sequences with an equal salt share pages; empty: no salt
    extra_keys   other values that change keys and values, in order, such as an adapter's id or an image's digest
    """

    def __init__(self, block_size: int, *, salt: bytes = b"", extra_keys: Sequence[bytes] = ()) -> None:
        if not 1 <= block_size < 2**32:
            raise InternalError(f"blocks of {block_size} tokens", expected="at least 1")
        self.block_size = block_size
        self.digests: list[bytes] = []  # 32 bytes for each full block
        self._parent = hashlib.sha256(TAG + struct.pack("<IQ", block_size, len(salt)) + salt).digest()
        self._keys = b"".join(struct.pack("<Q", len(key)) + key for key in extra_keys)
        self._open = b""  # tokens of the block that is not full

    @property
    def num_tokens(self) -> int:
        """The number of tokens added so far, including those of a last block that is not full."""
        return len(self.digests) * self.block_size + len(self._open) // _TOKEN_BYTES

    def copy(self) -> "BlockHashes":
        """Return a copy for another sequence with the same tokens so far. Extending the copy does not change this
        object."""
        found = copy.copy(self)
        found.digests, found._open = self.digests[:], self._open[:]
        return found

    def extend(self, tokens: Iterable[int]) -> list[bytes]:
        """Add the sequence's next tokens. Return the hashes of the blocks that these tokens fill, 32 bytes each; empty
        if no block became full.

        Raises InternalError if one of `tokens` is not a valid token id; then none of them is added.
        """
        fresh = list(tokens)
        try:
            self._open += struct.pack(f"<{len(fresh)}I", *fresh)
        except struct.error:
            odd = [one for one in fresh if not _is_token(one)]
            raise InternalError(
                f"{odd[0]} is no token id", where="BlockHashes.extend", expected=f"0 to {MAX_TOKEN}"
            ) from None
        size = self.block_size * _TOKEN_BYTES
        filled = len(self._open) // size * size
        begin = len(self.digests)
        for place in range(0, filled, size):
            block = self._open[place : place + size]
            self._parent = hashlib.sha256(self._parent + block + self._keys).digest()
            self.digests.append(self._parent)
        self._open = self._open[filled:]
        return self.digests[begin:]


def _is_token(given: object) -> bool:
    number = as_integer(given)
    return number is not None and 0 <= number <= MAX_TOKEN
