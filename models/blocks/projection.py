"""A linear between the hidden states and a token table of another width, as in OPT-350m."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectionSpec:
    """A linear between hidden states and token vectors of another size, `width`. `stored` is its checkpoint name."""

    width: int
    stored: str
