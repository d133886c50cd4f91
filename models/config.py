"""Reading a config.json: typed fields with errors that name them, in the old and the new spelling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.errors import ConfigError
from ingot.ir.tables import ROPE_TYPES

_MODEL_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


# Far above any model's sizes (the largest vocabularies and contexts stay below 2**24), and low enough that the bytes of
# a matrix of two of them can be counted in 64 bits.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024  # the deepest models have some hundred
MAX_NUMBER = 1e30  # as a float32, what the tables are computed in, it and its reciprocal are neither 0 nor infinite


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        text = f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else text[:100] + "…"


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding: which table maker, over how many elements of a head, with which constants."""

    rope_type: str
    theta: float
    rotary_dim: int
    constants: tuple[tuple[str, float], ...] = ()


class ConfigReader:
    """Typed access to the fields of one config.json."""

    def __init__(self, fields: Mapping[str, Any], source: str = "config.json") -> None:
        self.fields, self.source = fields, source

    def _error(self, field: str, expected: str) -> ConfigError:
        found = self.fields.get(field)
        what = f"field '{field}' is {_shown(found)}" if field in self.fields else f"field '{field}' is missing"
        return ConfigError(what, where=self.source, expected=expected)

    def integer(self, field: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive whole number, at most `most`."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self._error(field, f"a whole number from 1 to {most}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 1 / MAX_NUMBER <= value <= MAX_NUMBER:
            raise self._error(field, f"a number above 0, from {1 / MAX_NUMBER} to {MAX_NUMBER}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._error(field, "true or false")
        return value

    def require(self, field: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Refuse any value outside `allowed`: a field that would change the result and is not built."""
        value = self.fields.get(field)
        value = default if value is None else value
        if value not in allowed:
            raise self._error(field, " or ".join(repr(item) for item in allowed))

    def token_ids(self, field: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.fields.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self._error(field, "a token id or a list of them")
        return tuple(ids)

    def dtype(self) -> torch.dtype:
        """`dtype`, or `torch_dtype` as it was spelled before; float32 where neither stands, as transformers has it."""
        field = "torch_dtype" if self.fields.get("dtype") is None else "dtype"
        name = self.fields.get(field)
        name = "float32" if name is None else name
        if not isinstance(name, str) or name not in _MODEL_DTYPES:
            raise self._error(field, ", ".join(_MODEL_DTYPES))
        return _MODEL_DTYPES[name]

    def rope(self, head_dim: int) -> RopeSpec:
        """`rope_parameters`, or `rope_theta` with `rope_scaling` as they were spelled before."""
        new = self.fields.get("rope_parameters")
        field = "rope_scaling" if new is None else "rope_parameters"
        table = self.fields.get(field)
        table = {} if table is None else table
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise self._error(field, "an object with one rope_type and its numbers")
        scoped = ConfigReader({**self.fields, **table}, f"{self.source}, {field}")
        kind = table.get("rope_type", table.get("type", "default")) or "default"
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type {kind!r} is not supported", where=scoped.source, expected=", ".join(ROPE_TYPES)
            )
        rotary_dim = int(head_dim * scoped.number("partial_rotary_factor", 1.0))
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ConfigError(
                f"{rotary_dim} rotated elements of {head_dim}", where=scoped.source, expected="an even part"
            )
        constants: dict[str, float] = {}
        if kind in ("linear", "llama3"):
            constants["factor"] = scoped.number("factor")
        if kind == "llama3":
            constants["low_freq_factor"] = scoped.number("low_freq_factor")
            constants["high_freq_factor"] = scoped.number("high_freq_factor")
            constants["original_max_position"] = scoped.number("original_max_position_embeddings")
            if constants["high_freq_factor"] <= constants["low_freq_factor"]:
                raise ConfigError("high_freq_factor is not above low_freq_factor", where=scoped.source)
        return RopeSpec(kind, scoped.number("rope_theta", 10000.0), rotary_dim, tuple(sorted(constants.items())))
