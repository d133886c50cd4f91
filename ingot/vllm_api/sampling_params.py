"""vLLM's `SamplingParams`, whose fields can be set after construction."""

from collections.abc import Mapping
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.params.sampling_checks import CHECKS
from ingot.runtime.params.sampling_params import SamplingParams as FrozenParams

_MAX_BIAS = 100.0  # OpenAI's, in vLLM's SamplingParams.from_optional


class SamplingParams(FrozenParams):
    """How to sample the tokens of one request, with the fields of `ingot.SamplingParams`. Fields can be set later.

    Setting a field checks it together with the others. Raises RequestError for an invalid value or name.
    """

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        if name not in CHECKS:
            raise RequestError(
                f"unknown sampling parameter '{name}'", where="SamplingParams", expected="one of " + ", ".join(CHECKS)
            )
        self.__dict__.update(vars(FrozenParams(**{**vars(self), name: value})))

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Return parameters with `fields`. A field that is None keeps its default.

        As in vLLM, `logit_bias` may have token ids as text, and its numbers are limited to [-100, 100].
        """
        given = {name: value for name, value in fields.items() if value is not None}
        if isinstance(biases := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {_token_id(token): _limited(bias) for token, bias in biases.items()}
        return cls(**given)

    def clone(self) -> "SamplingParams":
        """Return a copy. Setting its fields does not change this object."""
        return type(self)(**vars(self))


def _token_id(token: Any) -> Any:
    """Return a token id that is written as text as a number. The constructor refuses anything else."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


def _limited(bias: Any) -> Any:
    """Return a bias within OpenAI's limits. The constructor refuses what is no number."""
    number = isinstance(bias, int | float) and not isinstance(bias, bool)
    return min(_MAX_BIAS, max(-_MAX_BIAS, bias)) if number else bias


def frozen(params: Any) -> Any:
    """Return a frozen copy of SamplingParams for the engine, so that a later change has no effect on running requests.

    `params` may be a list, or None, or something else; the engine checks those.
    """
    if isinstance(params, SamplingParams):
        return FrozenParams(**vars(params))
    return [frozen(one) for one in params] if isinstance(params, list | tuple) else params
