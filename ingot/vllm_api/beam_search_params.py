"""vLLM's `BeamSearchParams`, whose fields can be set after construction."""

from dataclasses import fields

from ingot.ir.errors import RequestError
from ingot.runtime.params.beam_search_params import BeamSearchParams as FrozenParams

_NAMES = tuple(one.name for one in fields(FrozenParams))


class BeamSearchParams(FrozenParams):
    """Options of a beam search, with the fields of `ingot.BeamSearchParams`. Fields can be set later.

    Setting a field checks it. vLLM's `structured_outputs` is refused. Raises RequestError for an invalid value or
    name.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        beam_width: int,
        max_tokens: int,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        length_penalty: float = 1.0,
        include_stop_str_in_output: bool = False,
        structured_outputs: object = None,
    ) -> None:
        if structured_outputs is not None:
            raise RequestError(
                "structured_outputs is not supported",
                where="BeamSearchParams.structured_outputs",
                expected="None",
                hint="a beam search takes the likeliest tokens, whatever they are",
            )
        super().__init__(beam_width, max_tokens, ignore_eos, temperature, length_penalty, include_stop_str_in_output)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _NAMES:
            expected = "one of " + ", ".join(_NAMES)
            raise RequestError(f"unknown parameter '{name}'", where="BeamSearchParams", expected=expected)
        self.__dict__.update(vars(FrozenParams(**{**vars(self), name: value})))
