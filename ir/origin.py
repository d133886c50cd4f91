"""Where a call comes from, in words: "layer 3, blocks/attention.py:176", or the pass that made it."""

import re

_LAYER = re.compile(r"\blayer (\d{1,9})\b")


def layer_of(origin: str) -> int | None:
    """The first layer that an origin names; None for what stands outside the layers."""
    found = _LAYER.search(origin)
    return int(found[1]) if found else None


def in_later_layer(origin: str, by: int) -> str:
    """The origin of the same place `by` layers further on."""
    return _LAYER.sub(lambda found: f"layer {int(found[1]) + by}", origin)
