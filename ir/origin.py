"""The origin of a call, as text: "layer 3, blocks/attention.py:176", or the pass that made it."""

import re

_LAYER = re.compile(r"\blayer (\d{1,9})\b")


def layer_of(origin: str) -> int | None:
    """Return the first layer number in an origin; None for a call outside the layers."""
    found = _LAYER.search(origin)
    return int(found[1]) if found else None


def in_later_layer(origin: str, by: int) -> str:
    """Return the same origin `by` layers later."""
    return _LAYER.sub(lambda found: f"layer {int(found[1]) + by}", origin)
