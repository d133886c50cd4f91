"""A linear between the stream and a table of tokens that is narrower or wider than the stream."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectionSpec:
    """A table `width` elements wide; `stored` is what the checkpoint calls the linear between it and the stream."""

    width: int
    stored: str
