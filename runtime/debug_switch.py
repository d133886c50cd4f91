"""INGOT_DEBUG=1: checks while serving that cost time, of what no request can bring about."""

import os

from ingot.ir.errors import OptionError

_VARIABLE = "INGOT_DEBUG"


def debugging() -> bool:
    """Whether the environment asks for them. Raises OptionError for a value that is neither."""
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{_VARIABLE} is {value!r:.80}", where="the environment", expected="1, or 0 for no checks")
    return value == "1"
