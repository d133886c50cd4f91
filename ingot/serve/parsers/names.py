"""Names of functions, and the headers of calls that contain them."""

import re

# OpenAI allows 64 letters, digits, underscores and dashes. Names of other servers' tools have dots, slashes and colons.
MAX_NAME = 256
_NAME = re.compile(r"[\w.\-/:@$]{1,256}")


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a function."""
    return _NAME.fullmatch(text) is not None


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
