"""The environment variable INGOT_DEBUG=1, which turns on slow checks for faults of Ingot itself while serving."""

import os

from ingot.ir.errors import OptionError

_VARIABLE = "INGOT_DEBUG"


def debugging() -> bool:
    """Return whether the environment variable INGOT_DEBUG is 1, which turns on slow internal checks. Raises OptionError
    for a value other than 0 or 1."""
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{_VARIABLE} is {value!r:.80}", where="the environment", expected="1, or 0 for no checks")
    return value == "1"
