"""Log-probabilities in OpenAI's two forms: lists by kind for completions, a list of objects for chats."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ingot.serve.engine.messages import TokenLogprob

# JSON has no infinity; vLLM returns this instead (vllm/entrypoints/openai).
_LEAST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """The form of completions. All lists have one entry for each token; a prompt's first token has None.

    text_offset   where the token's text begins in the text of the choice
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatLogprob(msgspec.Struct):
    """A token of a chat, or one of its alternatives."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatLogprob):
    """A generated token with the most likely tokens at its position."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    """The form of chats."""

    content: list[ChatTokenLogprob]


def completion_logprobs(
    entries: Iterable[Sequence[TokenLogprob] | None],
    token_ids: Sequence[int],
    first_texts: Sequence[str],
    *,
    offset: int,
    as_ids: bool,
) -> tuple[CompletionLogprobs, int]:
    """Return entries in the form of completions, and the offset after them.

    offset        the length of the texts of the choice's tokens before them
    entries       for each of `token_ids` its log-probabilities, the token's own first; None for a prompt's first token
    first_texts   the text of each token for which the entry is None, in order
    as_ids        write tokens as "token_id:42"
    """
    made = CompletionLogprobs([], [], [], [])
    texts = iter(first_texts)
    for token, entry in zip(token_ids, entries, strict=True):
        text = next(texts) if entry is None else entry[0][3] or ""
        made.text_offset.append(offset)
        offset += len(text)
        made.tokens.append(f"token_id:{token}" if as_ids else text)
        made.token_logprobs.append(None if entry is None else max(entry[0][1], _LEAST))
        made.top_logprobs.append(None if entry is None else {_named(one, as_ids): max(one[1], _LEAST) for one in entry})
    return made, offset


def chat_logprobs(entries: Iterable[Sequence[TokenLogprob]], top: int, *, as_ids: bool) -> ChatLogprobs:
    """Return entries in the form of chats, each with the `top` most likely tokens."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                **_fields(entry[0], as_ids),
                top_logprobs=[ChatLogprob(**_fields(one, as_ids)) for one in _most_likely(entry, top)],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: Iterable[Sequence[TokenLogprob] | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: a dict by token id for each token."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": max(value, _LEAST), "rank": rank, "decoded_token": text}
            for token, value, rank, text in entry
        }
        for entry in entries
    ]


def _most_likely(entry: Sequence[TokenLogprob], top: int) -> list[TokenLogprob]:
    return sorted(entry, key=lambda one: one[2])[:top]


def _named(one: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{one[0]}" if as_ids else one[3] or ""


def _fields(one: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    text = _named(one, as_ids)
    return {"token": text, "logprob": max(one[1], _LEAST), "bytes": list(text.encode("utf-8", "surrogatepass"))}
