"""Write JSON in canonical form (one text per value), and read JSON from untrusted files."""

import json
from collections.abc import Iterable

# No config.json, tensor header, manifest or plan nests deeper than about ten levels. This cap is well under the
# interpreter's recursion limit, so later recursive walks (dumping, copying) are safe as well.
MAX_DEPTH = 64


def dump_json(value: object) -> str:
    """Return `value` as JSON text that is the same on every machine.

    Keys are sorted, the indent is 1, all characters are ASCII, and a newline ends the text. Raises ValueError for NaN
    and infinities. Raises TypeError for values that JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def parse_json(data: bytes, *, strict: bool = True) -> object:
    """Parse JSON text in UTF-8 from a file that may be malicious, and return its value.

    `strict` rejects duplicate keys, NaN and Infinity. Use `strict=False` for a model's config.json, which may contain
    Infinity (Mamba 2's `time_step_limit`). Raises only ValueError, so that a caller can put "FILE is not JSON: " before
    the message.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    try:
        if strict:
            value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        else:
            value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    _check_depth(value)
    # An escaped half of a surrogate pair parses, but cannot be printed or hashed.
    if b"\\ud" in data.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair") from None
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} occurs twice in one object")
            seen.add(key)
    return value


def _no_constant(word: str) -> object:
    raise ValueError(f"the word {word} is no JSON number")


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            children: Iterable[object] = ()
            if isinstance(item, dict):
                children = item.values()
            elif isinstance(item, list):
                children = item
            deeper.extend(child for child in children if isinstance(child, (dict, list)))
        if not deeper:
            return
        level = deeper
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
