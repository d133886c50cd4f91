"""An HTTP request on its way from the front to a replica, with the hashes by which the router finds the replica."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ingot.serve.engine.routing import hash_blocks

# Some 16 tokens of English text, the page size of most artifacts.
BLOCK_BYTES = 64

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request.

    root_path   the prefix of `path` that the application has in the cluster
    query       the bytes after "?"
    hashes      a hash for each block of the prompt, which covers the earlier blocks, the key and the cache's salt
    """

    method: str
    path: str
    root_path: str
    query: bytes
    headers: Headers
    body: bytes
    hashes: tuple[bytes, ...]


class _Prompted(msgspec.Struct):
    """The fields of a body that the prompt depends on, in the order in which templates use them."""

    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Prompted)


def prompt_hashes(body: bytes, headers: Headers) -> tuple[bytes, ...]:
    """Return a hash for each BLOCK_BYTES bytes of the JSON of a prompt; none for a body that has no prompt.

    A conversation with a further turn has the blocks of the earlier turns. Requests of different keys have different
    hashes, because they share no cached pages.
    """
    try:
        found = _DECODER.decode(body)
    except msgspec.DecodeError:
        return ()  # the replica answers with the error
    text = b"".join((found.tools, found.system, found.instructions, found.messages, found.input, found.prompt))
    keys = [value for name, value in headers if name.lower() in (b"authorization", b"x-api-key")]
    salt = b"\n".join((*keys, bytes(found.cache_salt))).decode("latin-1")
    return tuple(hash_blocks(text, salt, BLOCK_BYTES))
