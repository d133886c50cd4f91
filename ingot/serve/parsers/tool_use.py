"""How a message may use the tools of its request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The tools of a request: the name of each function, and the function as the client describes it.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolUse:
    """The calls that a message may have.

    functions   the functions that it may call; none: text that looks like a call is content
    forced      it must call one of them, and has no other text
    named       the request names the function that must be called
    several     it may have more than one call
    """

    functions: Tools = field(default_factory=dict)
    forced: bool = False
    named: bool = False
    several: bool = True
