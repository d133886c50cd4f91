"""Names of functions, and the headers of calls that contain them."""

import re

from ingot.serve.parsers.source import Malformed, Source, Steps

# OpenAI allows 64 letters, digits, underscores and dashes. Names of other servers' tools have dots, slashes and colons.
MAX_NAME = 256
_LETTERS = re.compile(r"[\w.\-/:@$]+")


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a function."""
    return len(text) <= MAX_NAME and _LETTERS.fullmatch(text) is not None


def read_name(source: Source) -> Steps[str]:
    """Read the name of a function in double quotes. Raises Malformed at the first character that names do not have."""
    if (yield from source.literal('"')) is None:
        raise Malformed
    name = yield from source.run(_LETTERS, MAX_NAME)
    if not name or (yield from source.literal('"')) is None:
        raise Malformed
    return name


def plain_header(header: str) -> tuple[str, str | None]:
    """Return the name and the id of a call whose header is the name."""
    return header.strip(), None


def kimi_header(header: str) -> tuple[str, str | None]:
    """Return the name and the id of a call of Kimi's models. The id is the header: "functions.NAME:NUMBER"."""
    call_id = header.strip()
    return call_id.rpartition(":")[0].removeprefix("functions."), call_id


def mistral_header(header: str) -> tuple[str, str | None]:
    """Return the name and the id of a call of Mistral's models: "NAME", or "NAME[CALL_ID]ID"."""
    name, _, call_id = header.partition("[CALL_ID]")
    return name.strip(), call_id.strip() or None


def deepseek_header(header: str) -> tuple[str, str | None]:
    """Return the name of a call of DeepSeek V3, after the type of the tool: "function<｜tool▁sep｜>NAME"."""
    kind, _, name = header.partition("<｜tool▁sep｜>")
    return (name.strip() if kind.strip() == "function" else ""), None
