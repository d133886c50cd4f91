"""Changes of the table of backends for a test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ingot.backends.table import BACKENDS
from ingot.ir.backend import Backend


def patch_entry(patch: pytest.MonkeyPatch, name: str, **fields: Any) -> None:
    """Give the entry of a backend other fields."""
    patch.setitem(BACKENDS, name, replace(BACKENDS[name], **fields))


def without_inductor(patch: pytest.MonkeyPatch) -> None:
    """No region compiler competes on a CPU, which takes minutes. What it compiled before still loads."""
    patch_entry(patch, "inductor", emit={"cuda": BACKENDS["inductor"].emit["cuda"]})


def patch_backends(patch: pytest.MonkeyPatch, made: dict[str, Callable[[], Backend]]) -> None:
    """These backends, by name, are all that compete on a CPU; the first one leads where it is asked for."""
    first, *others = made
    for name in BACKENDS:
        make = made.get(name)
        emit = {} if make is None else {"cpu": lambda _, make=make: make()}
        patch_entry(patch, name, emit=emit, competing={"cpu": tuple(others)} if name == first else {})
