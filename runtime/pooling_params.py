"""`PoolingParams`: what one request wants of its vector. Names are vLLM's."""

from dataclasses import dataclass
from typing import ClassVar

from ingot.runtime.param_checks import boolean, integer, optional

_DIMENSIONS = optional(integer(1, expected="None or an integer >= 1"))
_NORMALIZE = optional(boolean)


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
        _DIMENSIONS("PoolingParams.dimensions", self.dimensions)
        _NORMALIZE("PoolingParams.normalize", self.normalize)
