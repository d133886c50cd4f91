"""The protocol through which features read a running request, and the type of the arrays that they fill."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class RequestView(Protocol):
    """The part of a running sequence that features use to fill step inputs. The runtime's `Request` implements it.

    row         its device row (row in states on the device)
    params      its sampling parameters, or pooling parameters
    seed        the seed of its random numbers
    max_total   the most tokens it may have, prompt included
    end_tokens  returns the ids of the tokens that end it
    """

    @property
    def row(self) -> int: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def params(self) -> Any: ...

    @property
    def seed(self) -> int: ...

    @property
    def max_total(self) -> int: ...

    @property
    def output_ids(self) -> Sequence[int]: ...

    def end_tokens(self) -> frozenset[int]: ...
