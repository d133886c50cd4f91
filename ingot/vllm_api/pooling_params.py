"""vLLM's `PoolingParams`."""

from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.params.pooling_params import PoolingParams as OwnParams

# Parameters of vLLM, also former ones, that have no meaning here, with the reason or with what to use.
_REFUSED = {
    "activation": "its name is use_activation",
    "extra_kwargs": "poolers take no extensions",
    "late_interaction_params": "a prompt has one vector, and none for each token",
    "output_kind": "a vector is returned whole",
    "requires_token_ids": "poolers get no token ids",
    "returned_token_ids": "a vector is returned whole",
    "skip_reading_prefix_cache": "LLM(enable_prefix_caching=False) turns the cache off",
    "softmax": "its name is use_activation",
    "step_tag_id": "a prompt has one vector, and none for each step",
    "task": "call the method of the task: embed, classify, score, or encode with a pooling_task",
    "truncate_prompt_tokens": "pass the token ids that the prompt shall have",
}


class PoolingParams(OwnParams):
    """Options for the vector of one request.

    dimensions       return only this many first elements of an embedding vector; None: all
    use_activation   whether an embedding vector has length 1, or whether classes have probabilities in place of
                     logits; None: the model's default, and probabilities
    normalize        the former name of `use_activation`
    others           vLLM's further parameters, which are refused unless they are None or False

    Raises RequestError for a bad value.
    """

    def __init__(
        self,
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        normalize: bool | None = None,
        **others: object,
    ) -> None:
        for name, value in others.items():
            if name not in _REFUSED:
                raise RequestError(f"unknown parameter '{name}'", where="PoolingParams", expected="a name of vLLM's")
            if value is not None and value is not False:
                where = f"PoolingParams.{name}"
                raise RequestError(f"{name} is not supported", where=where, expected=f"no {name}", hint=_REFUSED[name])
        if use_activation is not None and normalize not in (None, use_activation):
            raise RequestError("normalize and use_activation differ", where="PoolingParams", expected="one of them")
        super().__init__(dimensions, normalize if use_activation is None else use_activation)

    @property
    def use_activation(self) -> bool | None:
        """Whether an embedding vector has length 1, or whether classes have probabilities; None: the default."""
        return self.normalize


def own_params(params: Any, *, classes: bool) -> Any:
    """Return pooling parameters, or a list of them, for the engine, which checks the rest.

    classes   whether the model's vectors are logits of classes: the engine returns these whole, and as they are
    """
    if isinstance(params, list | tuple):
        return [own_params(one, classes=classes) for one in params]
    if not isinstance(params, OwnParams):
        return params
    if classes and params.dimensions is not None:
        where = "PoolingParams.dimensions"
        raise RequestError(f"dimensions is {params.dimensions}", where=where, expected="None for scores of classes")
    return OwnParams() if classes else OwnParams(params.dimensions, params.normalize)
