"""`PoolingParams`: what one request wants of its vector. Names are vLLM's."""

import numbers
from dataclasses import dataclass
from typing import ClassVar

from ingot.ir.errors import RequestError


@dataclass(frozen=True)
class PoolingParams:
    """Checked when made, frozen afterwards.

    dimensions   >= 1: keep so many elements of the vector from its front, for models that were trained for it
                 (Matryoshka, arXiv 2205.13147); None: all
    normalize    whether what is kept gets length 1; None: as the model's definition says
    """

    dimensions: int | None = None
    normalize: bool | None = None

    # What a scheduler asks of every request: nothing is counted, rated or ended by a token, and one result is to come.
    penalizes: ClassVar[bool] = False
    min_tokens: ClassVar[int] = 0
    max_tokens: ClassVar[int] = 1
    prompt_logprobs: ClassVar[None] = None
    ignore_eos: ClassVar[bool] = True
    stop_token_ids: ClassVar[tuple[int, ...]] = ()
    include_stop_str_in_output: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = self.dimensions
        if given is not None and (not isinstance(given, numbers.Integral) or isinstance(given, bool) or given < 1):
            raise RequestError(
                f"dimensions is {given!r:.80}", where="PoolingParams", expected="an integer from 1 on, or None"
            )
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(
                f"normalize is {self.normalize!r:.80}", where="PoolingParams", expected="True, False or None"
            )
