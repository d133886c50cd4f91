"""Server-sent events that have a type: those of `/v1/responses` and `/v1/messages`."""

from abc import abstractmethod

import msgspec

from ingot.serve.http.errors import HttpError
from ingot.serve.http.event_stream import Answer

_encode = msgspec.json.Encoder().encode


class TypedEvent(msgspec.Struct, tag_field="type"):
    """Base class of events. A class's tag is the type of its events."""


class TypedAnswer(Answer):
    """An answer with typed events. The last one says that the stream is complete, so no further mark follows it."""

    end = b""

    @abstractmethod
    def error_events(self, error: HttpError) -> bytes:
        """Return the events for an error that ends the stream, in the route's form."""


def typed_event(content: TypedEvent) -> bytes:
    """Return an event with its type in the line before its data."""
    tag = str(content.__struct_config__.tag)
    return b"event: " + tag.encode() + b"\ndata: " + _encode(content) + b"\n\n"
