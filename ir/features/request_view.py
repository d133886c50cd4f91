"""The protocol through which features read a running request, and the type of the arrays that they fill."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class RequestView(Protocol):
    """The part of a running request that features read to fill step inputs. The runtime's `Request` implements it.

    row         its device row: its row in states on the device
    prompt_ids  the ids of its prompt tokens
    params      its sampling parameters, or its pooling parameters
    seed        the seed of its random numbers
    max_total   the most tokens that it may have, prompt included
    output_ids  the ids of its generated tokens
    adapter_slot
                the slot of its LoRA adapter in the states on the device; -1: it uses none
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

    @property
    def adapter_slot(self) -> int: ...

    def end_tokens(self) -> frozenset[int]: ...
