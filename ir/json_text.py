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


# Columns of a list or an object on one line, without the key before it. A diff or a terminal shows them unwrapped.
_WIDTH = 120


def dump_lines(value: object) -> str:
    """Return `value` as JSON text for a file that people read too. It is the same on every machine.

    It differs from the text of `dump_json` in white space alone: a list or an object that fits on a line is on one
    line. A plan takes two thirds of the bytes so. Raises what `dump_json` raises.
    """
    return _lines(value, 0) + "\n"


def _lines(value: object, indent: int) -> str:
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value, ensure_ascii=True, allow_nan=False)
    if isinstance(value, dict):
        items = [f"{_key(key)}: {_lines(item, indent + 1)}" for key, item in sorted(value.items())]
    else:
        items = [_lines(item, indent + 1) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    # Brackets, and commas with a space. An item of several lines is longer than a line.
    if indent + 2 + sum(map(len, items)) + 2 * (len(items) - 1) <= _WIDTH and not any("\n" in one for one in items):
        return begin + ", ".join(items) + end
    margin = "\n" + " " * (indent + 1)
    return begin + margin + ("," + margin).join(items) + "\n" + " " * indent + end


def _key(key: object) -> str:
    return json.dumps({key: 0}, ensure_ascii=True)[1:-4]  # without the braces and ": 0"


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
