"""The text of a message in pieces, as it arrives at a parser."""

from __future__ import annotations

import random
from collections.abc import Iterable

from ingot.serve.parsers.events import Event, Parser, joined


def cut(draw: random.Random, text: str) -> list[str]:
    """Cut a text at random places, or into characters."""
    if draw.randrange(4) == 0:
        return list(text)
    places = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """The events of a whole message."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])
