"""The parameters of an op, and the binding of a call's arguments to them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameters:
    """The parameters of an op, in order.

    `names` are their names. The first `positional` of them may be passed by position. `defaults` maps the optional ones
    to their default values.
    """

    names: tuple[str, ...]
    positional: int
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Parameters":
        """Return the parameters of a Python function, from its signature."""
        found = inspect.signature(function).parameters.values()
        return cls(
            names=tuple(one.name for one in found),
            positional=sum(one.kind is not one.KEYWORD_ONLY for one in found),
            defaults={one.name: one.default for one in found if one.default is not _REQUIRED},
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by parameter name, in the order of the parameters, with defaults filled in.

        Raises TypeError if they do not fit the parameters. It is five times as fast as `inspect.Signature.bind`, and
        passes call it often.
        """
        if len(args) > self.positional:
            raise TypeError("too many positional arguments")
        given = dict(zip(self.names, args, strict=False))
        if given.keys() & kwargs.keys():
            raise TypeError(f"multiple values for argument '{next(name for name in given if name in kwargs)}'")
        given.update(kwargs)
        bound: dict[str, Any] = {}
        for name in self.names:
            if name in given:
                bound[name] = given[name]
            elif name in self.defaults:
                bound[name] = self.defaults[name]
            else:
                raise TypeError(f"missing a required argument: '{name}'")
        if len(given) > len(bound) or not given.keys() <= bound.keys():
            unknown = next(name for name in given if name not in bound)
            raise TypeError(f"got an unexpected keyword argument '{unknown}'")
        return bound

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by parameter name, also for a call that does not fit the parameters.

        A missing argument is None or its default. A surplus argument has its position as the key, such as "#3".
        """
        given = {**kwargs, **dict(zip(self.names, args, strict=False))}
        surplus = {f"#{place}": value for place, value in enumerate(args) if place >= len(self.names)}
        return {**dict.fromkeys(self.names), **self.defaults, **given, **surplus}
