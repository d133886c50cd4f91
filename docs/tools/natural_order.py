"""Names as a reader orders them."""

import re
from collections.abc import Iterable


def natural_order(names: Iterable[str]) -> list[str]:
    """By name, with numbers in their order: batch 4 before batch 32."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(names, key=key)
