"""The text of a message's content, for routes whose content parts have types of their own."""

from collections.abc import Mapping
from typing import Any

from ingot.serve.http.errors import HttpError


def content_text(content: object, where: str, text_fields: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    """Return the text of a content: a text itself, or a list of text parts, which are joined with newlines.

    where         names the content in errors
    text_fields   for each type of a text part, the name of the part's field that has the text
    reasons       for types of parts that this server does not support, the reason

    Raises HttpError 400 for other content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(400, f"the content is {content!r:.80}; expected: a text, or a list of text parts", param=where)
    # Chats join the parts of a message equally (`ingot.runtime.chat.messages`).
    return "\n".join(_part_text(part, f"{where}[{index}]", text_fields, reasons) for index, part in enumerate(content))


def _part_text(part: Any, where: str, text_fields: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = text_fields.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name is not None else None
    if isinstance(text, str):
        return text
    reason = reasons.get(kind, "") if isinstance(kind, str) else ""
    legal = ", ".join(f'"{one}"' for one in text_fields)
    raise HttpError(400, reason or f"{part!r:.80} is no text part; expected: one of type {legal}", param=where)
