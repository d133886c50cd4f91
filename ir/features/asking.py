"""The protocol through which features see a sequence, and the type of the arrays that they fill."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Asking(Protocol):
    """The part of a sequence that features read. `params` are its sampling parameters."""

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
