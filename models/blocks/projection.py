"""A linear between the stream and a token table of another width."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectionSpec:
    """A token table of `width` elements. `stored` is the checkpoint's name for the linear between it and the stream."""

    width: int
    stored: str
