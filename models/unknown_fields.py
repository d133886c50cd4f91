"""Find the fields of a config.json that the family's reader does not know, and refuse those that have an effect."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.config import shown
from ingot.models.config_fields import (
    ASIDE,
    CHANGES_THE_COMPUTATION,
    EXPERTS,
    GENERIC,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NEUTRAL,
    OF_EXPERTS,
    OF_WINDOWS,
    ON_BY_DEFAULT,
    POSITIONS,
    SAME,
)


@dataclass(frozen=True)
class Unknown:
    """A config.json field that the code for the model's family does not read, and its value.

    name    path of the field, such as "rope_scaling.alpha"
    about   how the field changes the computation; "" if that is not known
    """

    name: str
    value: Any
    about: str


def unknown_fields(
    config: Mapping[str, Any], known: Collection[str], others: Callable[[str], str], inside: str = ""
) -> Iterator[Unknown]:
    """Yield the config.json fields that the code for the model's family does not read, but that may have an effect.

    known    names of the fields that the code reads. If a value is an object, its fields are searched too.
    others   field name -> a phrase about other families that read the field, or ""
    inside   path prefix of the fields in `config`, such as "rope_scaling."; "" at the top level
    """
    for name, value in config.items():
        if name in known:
            if isinstance(value, dict) and name not in GENERIC:
                yield from unknown_fields(value, known, others, f"{inside}{name}.")
        elif name not in GENERIC and not ASIDE.fullmatch(name) and not _changes_nothing(name, value, config, known):
            about = CHANGES_THE_COMPUTATION.get(name) or others(name) or _another_name(name, known)
            yield Unknown(inside + name, value, about)


def refuse_meaning(unknown: Collection[Unknown], family: str, source: str) -> None:
    """Raise ConfigError if fields that are not read change the computation. The error names them.

    `family` and `source`, the model family and the file, are for the message.
    """
    meant = [one for one in unknown if one.about]
    if not meant:
        return
    lines = [f"field '{one.name}' is {shown(one.value)}: {one.about}" for one in meant]
    raise ConfigError(
        f"the definition of {family} does not support fields of the configuration\n"
        + "\n".join(f"    {line}" for line in lines),
        where=source,
        expected=" or ".join(["no such field", "null", *_neutral_texts(meant)]),
        hint="without it the model would compute something else. Remove the field from config.json only if the model "
        "was trained without it",
    )


def _neutral_texts(unknown: Collection[Unknown]) -> list[str]:
    values = [value for one in unknown for value in NEUTRAL.get(one.name.rpartition(".")[2], (False,))]
    return list(dict.fromkeys(map(_json_text, values)))


def _json_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _off(name: str, value: object) -> bool:
    """Return whether a field with this value has no effect: it disables something, or is a factor such as 1.0."""
    if name in ON_BY_DEFAULT:
        return value is None or value in NEUTRAL[name]
    if value is None or value is False or value in (0, "", [], {}):
        return True
    return not isinstance(value, bool) and value in NEUTRAL.get(name, ())


def _changes_nothing(name: str, value: object, config: Mapping[str, Any], known: Collection[str]) -> bool:
    """Return whether a field that no code reads has no effect, given the other fields of the config.json.

    `known` are the names of the fields that the code for the model's family reads.
    """
    if _off(name, value):
        return True
    row = next((row for row in SAME if name in row), ())
    if any(other in known and other != name and config.get(other) == value for other in row):
        return True
    if name in KV_HEADS and not any(other in known for other in KV_HEADS):  # such models have as many as heads
        return value == _first(config, HEADS, known)
    without_windows = _without_windows(config)
    if name in OF_WINDOWS and without_windows:
        return True
    if name in OF_EXPERTS and all(_off(field, config.get(field)) for field in EXPERTS):
        return True
    if name == "layer_types":
        kinds = set(map(str, value)) if isinstance(value, list) else {str(value)}
        return kinds <= {"full_attention", *(["sliding_attention"] if without_windows else [])}
    if name == "head_dim":
        size, heads = (_first(config, row, known) for row in (HIDDEN, HEADS))
        return isinstance(value, int) and isinstance(size, int) and isinstance(heads, int) and value * heads == size
    return False


def _another_name(name: str, known: Collection[str]) -> str:
    """Return "another value than FIELD has" if the code reads a synonym FIELD of this field, else "".

    Context lengths do not count as synonyms, because configs also store the lengths used in training.
    """
    row = next((row for row in SAME if name in row and row is not POSITIONS), ())
    read = [other for other in row if other in known]
    return f"another value than {read[0]} has" if read else ""


def _without_windows(config: Mapping[str, Any]) -> bool:
    """Return whether sliding windows have no effect: no layer has one, or they are as long as the whole context."""
    if not config.get("use_sliding_window", True):
        return True
    window, most = config.get("sliding_window"), config.get("max_position_embeddings")
    return not window or (isinstance(window, int) and isinstance(most, int) and window >= most)


def _first(config: Mapping[str, Any], row: tuple[str, ...], known: Collection[str]) -> object:
    """Return the value of the first field of `row` that is in `known` and that the config.json sets, or None.

    `row` holds synonymous field names. `known` are the names of fields that the code reads.
    """
    return next((config[name] for name in row if name in known and config.get(name) is not None), None)
