"""The fields of a quantization_config, read so that no field is overlooked."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ingot.ir.errors import ConfigError

T = TypeVar("T")
ORIGINAL = "use the original checkpoint; --quantize int8 quantizes it"


@dataclass
class Fields:
    """A JSON object of a quantization_config, and which of its fields were read.

    values   the object
    where    where it is, for errors
    """

    values: Mapping[str, Any]
    where: str
    _read: set[str] = field(default_factory=set)

    def get(self, name: str, kind: type[T] | tuple[type[T], ...], default: T) -> T:
        """Return a field. If it is missing or null, return `default`. Raises ConfigError for another type."""
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(name, f"is {value!r:.80}", " or ".join(one.__name__ for one in kinds))
        return value

    def choice(self, name: str, choices: Collection[T], default: T) -> T:
        """Return a field whose value must be one of `choices`. A missing or null field has the value `default`."""
        self._read.add(name)
        value = self.values.get(name)
        value = default if value is None else value
        if not any(value == one and type(value) is type(one) for one in choices):
            raise self.error(name, f"is {value!r:.80}", " or ".join(map(repr, choices)))
        return value

    def names(self, *names: str) -> tuple[str, ...]:
        """Return the texts of a list of texts, from the first of the fields `names` that is not null."""
        self._read.update(names)
        for name in names:
            if (value := self.values.get(name)) is not None:
                if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                    raise self.error(name, f"is {value!r:.80}", "a list of texts")
                return tuple(value)
        return ()

    def object(self, name: str) -> "Fields | None":
        """Return a field that is an object; None if it is missing or null."""
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r:.80}", "an object")
        return Fields(value, f"{self.where}.{name}")

    def skip(self, *names: str) -> None:
        """Mark fields as read that do not change what the stored tensors mean."""
        self._read.update(names)

    def end(self) -> None:
        """Raise ConfigError if a field was not read."""
        unread = sorted(name for name, value in self.values.items() if name not in self._read and value is not None)
        if unread:
            raise ConfigError(
                f"the quantization has fields that are not understood: {', '.join(unread)[:300]}",
                where=self.where,
                expected=f"only {', '.join(sorted(self._read))}",
                hint=ORIGINAL,
            )

    def error(self, name: str, problem: str, expected: str) -> ConfigError:
        return ConfigError(
            f"the field '{name}' of the quantization {problem}, which cannot be read",
            where=self.where,
            expected=expected,
            hint=ORIGINAL,
        )


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether one of `patterns` names a module.

    A pattern is whole words of a module's name, such as "lm_head" or "layers.0.mlp", or "re:" and a regular expression
    that matches from the name's start. A pattern that names a module names all inside it.
    """
    plain = [one for one in patterns if not one.startswith("re:")]
    regular = [re.compile(one.removeprefix("re:")) for one in patterns if one.startswith("re:")]

    def matches(module: str) -> bool:
        return any(f".{one}." in f".{module}." for one in plain) or any(one.match(module) for one in regular)

    return matches
