"""Model definitions that a test changes."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.models.architectures import ARCHITECTURES


def change_definition(patch: pytest.MonkeyPatch, architecture: str, **changes: Any) -> None:
    """Give the definition of an architecture, by its name in config.json, other fields until the patch ends."""
    row = ARCHITECTURES[architecture]
    changed = replace(row, definition=replace(row.definition, **changes))
    patch.setitem(ARCHITECTURES, architecture, changed)  # type: ignore[arg-type]  # a dict
