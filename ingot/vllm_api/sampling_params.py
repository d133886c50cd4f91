"""vLLM's `SamplingParams`, whose fields can be set after construction, and `StructuredOutputsParams`."""

from dataclasses import dataclass
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.sampling_checks import CHECKS
from ingot.runtime.sampling_params import SamplingParams as FrozenParams


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
        """Return parameters with `fields`. A field that is None keeps its default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """Return a copy. Setting its fields does not change this object."""
        return type(self)(**vars(self))


def frozen(params: Any) -> Any:
    """Return a frozen copy of SamplingParams for the engine, so that a later change has no effect on running requests.

    `params` may be a list, or None, or something else; the engine checks those.
    """
    if isinstance(params, SamplingParams):
        return FrozenParams(**vars(params))
    return [frozen(one) for one in params] if isinstance(params, list | tuple) else params


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A grammar for the output, one field of: a JSON schema, a regular expression, a list of texts, a grammar, any JSON
    object, or a structural tag. SamplingParams refuses it, because grammars are not supported yet."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
