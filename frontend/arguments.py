"""Normalize the arguments of calls, so that equal calls have equal text. Programs are compared as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class _Parameter:
    """A parameter in the schema of a torch op. `by_name` says whether it is keyword-only."""

    name: str
    by_name: bool
    has_default: bool
    default: Any
    is_float: bool

    def stands_for(self, value: Any) -> bool:
        """Return whether an argument can be omitted: `value` equals the parameter's default in value and type."""
        return self.has_default and type(value) is type(self.default) and bool(value == self.default)


@lru_cache
def _parameters(target: torch._ops.OpOverload) -> tuple[_Parameter, ...]:
    found = []
    for one in target._schema.arguments:
        kind = one.type.getElementType() if one.type.kind() == "OptionalType" else one.type
        has_default = one.has_default_value()
        default = one.default_value if has_default else None
        found.append(_Parameter(one.name, one.kwarg_only, has_default, default, kind.kind() == "FloatType"))
    return tuple(found)


def one_spelling(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call of `target` in one normal form.

    Equal calls then have equal text in a program. Arguments are positional where the schema allows it. Defaults are
    left out. An int for a float parameter becomes a float. Arguments that the schema lacks are kept, and the op rejects
    them later.
    """
    parameters = _parameters(target)
    positional = [one for one in parameters if not one.by_name]
    given, ordered = dict(kwargs), list(args)
    while any(one.name in given for one in positional[len(ordered) :]):
        parameter = positional[len(ordered)]
        if parameter.name not in given and not parameter.has_default:
            break
        ordered.append(given.pop(parameter.name, parameter.default))
    ordered[: len(positional)] = [_as_float(*one) for one in zip(positional, ordered, strict=False)]
    while 0 < len(ordered) <= len(positional) and positional[len(ordered) - 1].stands_for(ordered[-1]):
        ordered.pop()
    named = {one.name: _as_float(one, given.pop(one.name)) for one in parameters if one.name in given}
    by_name = {one.name: one for one in parameters}
    named = {name: value for name, value in named.items() if not by_name[name].stands_for(value)}
    return ordered, {**named, **given}


def _as_float(parameter: _Parameter, value: Any) -> Any:
    return float(value) if parameter.is_float and type(value) is int else value
