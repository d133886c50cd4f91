"""The frames between rank 0's process and the agent of another host, over one TCP connection. Imports no torch.

A frame is its kind (a byte), the length of its content (4 bytes), and the content. Numbers are little-endian.
"""

import socket
import struct
from collections.abc import Iterable, Sequence
from enum import Enum

# A mesh has a token of so many random bytes, which an agent sends first: 256 bits cannot be guessed.
TOKEN_BYTES = 32
# A connection whose other end does not answer ends after three seconds: the kernel asks twice, after one second and
# after two. It does so while this process holds Python's lock, as it does when it loads a library. With the second in
# which processes end, all ranks end within five seconds.
_SILENT_SECONDS = 3
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_SECONDS - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000),  # while sent bytes are not confirmed
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # an order is a small frame, for which ranks wait
)
_HEAD = struct.Struct("<cI")
_PIECE = struct.Struct("<II")
_SLOT = struct.Struct("<I")


class Kind(bytes, Enum):
    """The kinds of frames. The two orders have the letters of `posted_steps.py`."""

    STEP = b"S"
    ENDING = b"E"
    DECIDED = b"D"  # what rank 0 has decided, as JSON
    LEFT = b"L"  # a file that a rank has left for others, in either direction
    JOINED = b"J"  # an agent has started its processes: facts of its host, as JSON
    REFUSED = b"X"  # an agent cannot start them: an error, as JSON
    REPORT = b"R"  # what a rank reports


def set_options(connection: socket.socket) -> None:
    """Let a connection send at once, and end when its other end is silent."""
    for level, name, value in _OPTIONS:
        connection.setsockopt(level, name, value)


def frame(kind: bytes, *parts: bytes | memoryview) -> bytes:
    """Return a frame, whose content is the parts one after another."""
    return b"".join((_HEAD.pack(kind, sum(map(len, parts))), *parts))


def read_frame(connection: socket.socket) -> tuple[Kind, bytes] | None:
    """Wait for a frame, and return its kind and content; None if the other end has closed the connection. Raises
    OSError if the connection breaks."""
    head = read_exactly(connection, _HEAD.size)
    if head is None:
        return None
    kind, size = _HEAD.unpack(head)
    content = read_exactly(connection, size)
    return None if content is None else (Kind(kind), content)


def read_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Wait for so many bytes; None if the other end closes the connection before."""
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if count == 0:
            return None
        at += count
    return bytes(found)


def order_parts(place: int, pieces: Iterable[tuple[int, memoryview]]) -> list[bytes | memoryview]:
    """Return the content of an order: the index of a slot, and pieces of it. A piece is the index of its first word of
    four bytes, and its words as bytes."""
    parts: list[bytes | memoryview] = [_SLOT.pack(place)]
    for begin, words in pieces:
        parts += (_PIECE.pack(begin, len(words)), words)
    return parts


def read_order(content: bytes) -> tuple[int, Sequence[tuple[int, memoryview]]]:
    """Return what `order_parts` has written."""
    view, at = memoryview(content), _SLOT.size
    pieces = []
    while at < len(view):
        begin, size = _PIECE.unpack_from(view, at)
        at += _PIECE.size
        pieces.append((begin, view[at : at + size]))
        at += size
    return _SLOT.unpack_from(view)[0], pieces


def named_parts(name: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the content of a frame that holds a file."""
    encoded = name.encode()
    return _SLOT.pack(len(encoded)), encoded, content


def read_named(content: bytes) -> tuple[str, bytes]:
    """Return the name and the content of a file that `named_parts` has written."""
    end = _SLOT.size + int(_SLOT.unpack_from(content)[0])
    return content[_SLOT.size : end].decode(), content[end:]
