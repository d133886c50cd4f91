"""Frames and the engine's channel: pieces of any size, messages without waiting, the end of the other side."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from ingot.serve.engine.channel import Channel, ServerGone
from ingot.serve.engine.messages import (
    ENGINE_DECODER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    SERVER_DECODER,
    Abort,
    Add,
    Delta,
    Frames,
    Order,
    Pool,
    Stats,
    Step,
    frame,
)

ADD = Add(1, [1, 2, 3], {"temperature": 0.5, "stop": ["a"]}, True, 0, None)


def test_messages_survive_any_cut() -> None:
    sent = [
        ADD,
        Abort(7),
        Add(2**40, [], {}, False, -3, "sält"),
        Pool(8, [1], {"dimensions": 2}, 0, None),
        Order(9, "drain"),
    ]
    content = b"".join(map(frame, sent))
    for size in (1, 2, 3, 5, 64, len(content)):
        frames = Frames()
        found = [
            ENGINE_DECODER.decode(one)
            for begin in range(0, len(content), size)
            for one in frames.split(content[begin : begin + size])
        ]
        assert found == sent


def test_a_step_survives() -> None:
    delta = Delta(3, 0, [5], "é", [[(5, -0.5, 1, "é"), (6, float("-inf"), 2, None)]], "stop", 5, [None], 16)
    (content,) = Frames().split(frame(Step([delta], Stats(1, 2))))
    assert SERVER_DECODER.decode(content) == Step([delta], Stats(1, 2))


def test_a_frame_too_long_is_an_error() -> None:
    head = (MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "little")
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().split(head))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with theirs:
        yield Channel(ours), theirs


def test_a_channel_receives_without_waiting(ends: tuple[Channel, socket.socket]) -> None:
    channel, server = ends
    assert channel.receive(wait=False) == []
    content = frame(ADD)
    server.sendall(content[:10])
    assert channel.receive(wait=False) == []
    server.sendall(content[10:] + frame(Abort(1)))
    assert channel.receive(wait=True) == [ADD, Abort(1)]
    server.close()
    with pytest.raises(ServerGone):
        channel.receive(wait=False)


def test_a_slow_server_stops_no_step(ends: tuple[Channel, socket.socket]) -> None:
    """Frames that the socket does not accept are kept, and sent later, in order and whole."""
    channel, server = ends
    steps = [Step([Delta(key, 0, [key], "x" * 1000)], Stats()) for key in range(2000)]
    for step in steps:
        channel.send(step)  # 2 MB, ten times the socket's buffer
    frames, found = Frames(), []
    while len(found) < len(steps):
        channel.receive(wait=False)  # sends what it has kept
        assert select.select([server], [], [], 10)[0]
        found += [SERVER_DECODER.decode(one) for one in frames.split(server.recv(1 << 20))]
    assert found == steps


def test_a_server_that_left_ends_sending(ends: tuple[Channel, socket.socket]) -> None:
    channel, server = ends
    server.close()
    with pytest.raises(ServerGone):
        channel.send(Step([], Stats()))
