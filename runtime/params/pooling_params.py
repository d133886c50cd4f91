"""`PoolingParams`: options for the vector of one request. Names are vLLM's."""

from dataclasses import dataclass
from typing import ClassVar

from ingot.runtime.params.param_checks import boolean, integer, optional

_DIMENSIONS = optional(integer(1, expected="None or an integer >= 1"))
_NORMALIZE = optional(boolean)


@dataclass(frozen=True)
class PoolingParams:
    """Options for the embedding vector of one request. The constructor checks them; instances are frozen.

    dimensions   return only this many first elements of the vector, at least 1; None: all. For models trained for it
                 (Matryoshka, arXiv 2205.13147)
    normalize    whether to normalize the returned elements to length 1; None: the model's default
    """

    dimensions: int | None = None
    normalize: bool | None = None

    # The scheduler reads these of every request. A pooling request has no penalties, edits, prompt_logprobs or stop
    # tokens, and one result.
    penalizes: ClassVar[bool] = False
    edits_logits: ClassVar[bool] = False
    structured_outputs: ClassVar[None] = None
    min_tokens: ClassVar[int] = 0
    max_tokens: ClassVar[int] = 1
    prompt_logprobs: ClassVar[None] = None
    ignore_eos: ClassVar[bool] = True
    stop_token_ids: ClassVar[tuple[int, ...]] = ()
    include_stop_str_in_output: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _DIMENSIONS("PoolingParams.dimensions", self.dimensions)
        _NORMALIZE("PoolingParams.normalize", self.normalize)
