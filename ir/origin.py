"""The origin of a call, as text: "layer 3, blocks/attention.py:176", or the pass that made it."""

import re

_LAYER = re.compile(r"\blayer (\d{1,9})\b")


def layer_of(origin: str) -> int | None:
    """Return the first layer number in an origin such as "layer 3, attention.py:176"; None if it names no layer."""
    found = _LAYER.search(origin)
    return int(found[1]) if found else None


def in_later_layer(origin: str, by: int) -> str:
    """Return an origin such as "layer 3, attention.py:176" with `by` added to its layer number."""
    return _LAYER.sub(lambda found: f"layer {int(found[1]) + by}", origin)
