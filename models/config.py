"""Typed access to the fields of a config.json, with errors that name the field. It reads old and new field names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.errors import ConfigError
from ingot.ir.recipe import Attr
from ingot.ir.tables import ROPE_TYPES

_MODEL_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Other names of rope types in some configurations.
_ROPE_ALIASES = {"su": "longrope"}


# Above any model's sizes (the largest vocabularies and contexts are below 2**24), and so low that the byte count of a
# matrix with two such sizes fits into 64 bits.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024  # the deepest models have some hundred
MAX_NUMBER = 1e30  # it and its reciprocal are neither 0 nor infinite in float32, the dtype of tables


def shown(value: object) -> str:
    """Return a value as text for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        text = f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else text[:100] + "…"


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding, as a config.json describes it.

    rope_type    the type, such as "yarn"; "default" if the embedding is not scaled
    theta        the base
    rotary_dim   number of rotated elements of a head, the first ones
    constants    (name, value) pairs that the type needs, such as ("factor", 4.0), sorted by name
    """

    rope_type: str
    theta: float
    rotary_dim: int
    constants: tuple[tuple[str, Attr], ...] = ()

    def number(self, name: str) -> float:
        """Return the value of the constant `name`, which must exist and be a number."""
        found = dict(self.constants)[name]
        assert isinstance(found, int | float), f"{name} is {found!r}"
        return found


class _Watched(dict[str, Any]):
    """A dict of config fields that records which fields are read: it adds their names to the set `asked`."""

    def __init__(self, fields: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(fields)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


class ConfigReader:
    """Reads the fields of one config.json and checks their types. Its methods raise ConfigError for invalid values.

    source   name of the file in errors
    asked    names of the fields that were read so far
    """

    def __init__(
        self, fields: Mapping[str, Any], source: str = "config.json", *, asked: set[str] | None = None
    ) -> None:
        self.asked = set() if asked is None else asked
        self.fields: Mapping[str, Any] = _Watched(fields, self.asked)
        self.source = source

    def within(self, fields: Mapping[str, Any], source: str | None = None) -> "ConfigReader":
        """Return a reader of other fields, such as those of a nested object.

        It adds the names of fields that it reads to the set `asked` of this reader. `source` names the object in
        errors; None: the name in this reader.
        """
        return ConfigReader(fields, source or self.source, asked=self.asked)

    def error(self, field: str, expected: str) -> ConfigError:
        """Return the error for a field that is missing or has a wrong value. `expected` describes a right value."""
        found = self.fields.get(field)
        what = f"field '{field}' is {shown(found)}" if field in self.fields else f"field '{field}' is missing"
        return ConfigError(what, where=self.source, expected=expected)

    def integer(self, field: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """Return the value of a field that must be a whole number from 1 to `most`.

        `default` replaces a missing or null value. Without a default, such a value raises ConfigError.
        """
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.error(field, f"a whole number from 1 to {most}")
        return value

    def count(self, field: str, default: int, *, most: int = MAX_SIZE) -> int:
        """Return the value of a field that must be a whole number from 0 to `most`.

        `default` replaces a missing or null value.
        """
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise self.error(field, f"a whole number from 0 to {most}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return the value of a field that must be a positive number. `default` replaces a missing or null value."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 1 / MAX_NUMBER <= value <= MAX_NUMBER:
            raise self.error(field, f"a number above 0, from {1 / MAX_NUMBER} to {MAX_NUMBER}")
        return float(value)

    def number_or_none(self, field: str) -> float | None:
        """Return the value of a field that must be a positive number; None if it is null or missing."""
        return None if self.fields.get(field) is None else self.number(field)

    def integer_or_none(self, field: str) -> int | None:
        """Return the value of a field that must be a positive whole number; None if it is null or missing."""
        return None if self.fields.get(field) is None else self.integer(field)

    def flag(self, field: str, default: bool) -> bool:
        """Return the value of a field that must be true or false. `default` replaces a missing or null value."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def choice(self, field: str, choices: Mapping[str, str], default: str) -> str:
        """Return `choices[text]`, where `text` is the field's value. `default` replaces a missing or null value."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.error(field, " or ".join(choices))
        return choices[value]

    def require(self, field: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raise ConfigError unless the field's value is one of `allowed`, the values that Ingot supports.

        `default` replaces a missing or null value.
        """
        value = self.fields.get(field)
        value = default if value is None else value
        if value not in allowed:
            raise self.error(field, " or ".join(repr(item) for item in allowed))

    def listed(self, field: str, length: int, allowed: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the value of a field that must be a list of `length` values, each one of `allowed`.

        Return None if the field is missing or null.
        """
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(item not in allowed for item in value):
            raise self.error(field, f"a list of {length} of {', '.join(map(repr, allowed))}")
        return tuple(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        """Return the token ids of a field that holds one id or a list of them; () if it is null or missing."""
        value = self.fields.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        # Token ids are int32 in all computations.
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 31 for item in ids):
            raise self.error(field, "a token id or a list of them")
        return tuple(ids)

    def dtype(self) -> torch.dtype:
        """Return the dtype in the field `dtype` or, if that is missing, in the older field `torch_dtype`.

        If both are missing, it is float32, as in transformers.
        """
        field = "torch_dtype" if self.fields.get("dtype") is None else "dtype"
        name = self.fields.get(field)
        name = "float32" if name is None else name
        if not isinstance(name, str) or name not in _MODEL_DTYPES:
            raise self.error(field, ", ".join(_MODEL_DTYPES))
        return _MODEL_DTYPES[name]

    def sliding_layers(self, layers: int, pattern: int | None, *, first_full: bool = False) -> tuple[bool, ...]:
        """Return for each of `layers` layers whether its attention has a sliding window.

        The field `layer_types` lists it. Without this field, the last of every `pattern` layers has no window, and all
        others have one. With `first_full`, it is the first of every `pattern` layers that has none. If `pattern` is
        None, all layers have one.
        """
        types = self.listed("layer_types", layers, ("sliding_attention", "full_attention"))
        if types is not None:
            return tuple(kind == "sliding_attention" for kind in types)
        offset = 0 if first_full else 1
        return tuple(pattern is None or (index + offset) % pattern != 0 for index in range(layers))

    def rope(self, head_dim: int, *, layer_type: str | None = None, theta: float = 10000.0) -> RopeSpec:
        """Return the rotary embedding from the field `rope_parameters`, or from older fields.

        The older ones are `rope_theta` and `rope_scaling`.

        head_dim     elements of a head
        layer_type   type of layer, such as "full_attention", if the config has one rotary embedding for each type
        theta        the base if the config has none
        """
        new = self.fields.get("rope_parameters")
        field = "rope_scaling" if new is None else "rope_parameters"
        table = self.fields.get(field)
        if isinstance(table, dict) and layer_type is not None and layer_type in table:
            table = table[layer_type]
        if isinstance(table, dict) and layer_type is not None and table.get("truncate") is False:
            # Transformers reads it outside of the tables by kind of layer, so the intended value is unknown.
            raise self.error(field, f"no 'truncate' in the table of {layer_type}")
        table = {} if table is None else table
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise self.error(field, "an object with one rope_type and its numbers")
        fields = {**self.fields, **table}
        if layer_type is None and self.fields.get("original_max_position_embeddings") is not None:
            # Phi-3 stores it outside the table, and in transformers that value has precedence.
            fields["original_max_position_embeddings"] = self.fields["original_max_position_embeddings"]
        return _rope_spec(self.within(fields, f"{self.source}, {field}"), table, head_dim, theta)


def _rope_spec(config: ConfigReader, table: Mapping[str, Any], head_dim: int, theta: float) -> RopeSpec:
    """Return the rotary embedding that the object `table` of the config.json describes.

    `config` reads the fields of this object and, where it lacks one, of the file.
    """
    kind = table.get("rope_type", table.get("type", "default")) or "default"
    kind = _ROPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(f"rope_type {kind!r} is not supported", where=config.source, expected=", ".join(ROPE_TYPES))
    rotary_dim = int(head_dim * config.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {rotary_dim} elements of {head_dim}",
            where=config.source,
            expected="an even part of a head",
        )
    constants: dict[str, Attr] = {}
    if kind in ("linear", "llama3", "dynamic"):
        constants["factor"] = config.number("factor")
    if kind == "dynamic":
        constants["original_max_position"] = float(config.integer("max_position_embeddings", 2048))
        if rotary_dim < 4:
            raise ConfigError(
                f"rope_type dynamic with {rotary_dim} rotated elements", where=config.source, expected="at least 4"
            )
    if kind == "llama3":
        constants["original_max_position"] = _original(config)
        low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
        constants.update(low_freq_factor=low, high_freq_factor=high)
        if high < low:
            raise ConfigError("high_freq_factor is below low_freq_factor", where=config.source)
    if kind == "yarn":
        constants.update(_yarn_constants(config, table))
    if kind == "longrope":
        constants.update(_longrope_constants(config, rotary_dim))
    base = config.number("rope_theta", theta)
    if kind == "yarn" and base <= 1:
        raise config.error("rope_theta", "a number above 1, for yarn")
    return RopeSpec(kind, base, rotary_dim, tuple(sorted(constants.items())))


def _original(config: ConfigReader) -> float:
    """Return the context length before rope scaling.

    It is the field `original_max_position_embeddings`, or `max_position_embeddings` if that is missing.
    """
    return config.number("original_max_position_embeddings", config.integer("max_position_embeddings", 2048))


def _stretch(config: ConfigReader, original: float) -> float:
    """Return the factor by which rope scaling extends the context. `original` is the length before scaling.

    It is the field `factor`, or `max_position_embeddings` / `original` if that is missing.
    """
    return config.number_or_none("factor") or config.integer("max_position_embeddings", 2048) / original


def _yarn_constants(config: ConfigReader, table: Mapping[str, Any]) -> dict[str, Attr]:
    original = _original(config)
    factor = _stretch(config, original)

    def attention_scale(mscale: float) -> float:
        # YaRN's temperature, equation 22: 0.1 ln(s) + 1.
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scale = config.number_or_none("attention_factor")
    if scale is None:
        both = table.get("mscale") and table.get("mscale_all_dim")
        scale = attention_scale(1.0)
        if both:
            scale = attention_scale(config.number("mscale")) / attention_scale(config.number("mscale_all_dim"))
    return {
        "original_max_position": original,
        "factor": factor,
        "beta_fast": config.number("beta_fast", 32.0),
        "beta_slow": config.number("beta_slow", 1.0),
        "truncate": config.flag("truncate", True),
        "attention_factor": scale,
    }


def _longrope_constants(config: ConfigReader, rotary_dim: int) -> dict[str, Attr]:
    original = _original(config)
    factor = _stretch(config, original)
    scale = config.number_or_none("attention_factor")
    if scale is None:
        if original < 2:
            raise config.error("original_max_position_embeddings", "at least 2, for longrope")
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    constants: dict[str, Attr] = {"original_max_position": original, "attention_factor": scale}
    for field in ("short_factor", "long_factor"):
        values = config.fields.get(field)
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) and 1 / MAX_NUMBER <= value <= MAX_NUMBER
            for value in values
        )
        if not isinstance(values, list) or not numbers or len(values) != rotary_dim // 2:
            raise config.error(field, f"a list of {rotary_dim // 2} positive numbers")
        constants[field] = tuple(float(value) for value in values)
    return constants
