"""What a caller may give as a prompt, checked and turned into token ids."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ingot.ir.errors import RequestError
from ingot.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, or None when token ids were given, and its token ids, at least one."""

    text: str | None
    token_ids: list[int]


PromptLike = str | Sequence[int] | Mapping[str, object] | Prompt

FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def read_prompt(prompt: PromptLike, tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    """Check a prompt; `vocab_size` is that of the model. Raises RequestError."""
    if isinstance(prompt, Prompt):  # a chat's
        return Prompt(prompt.text, _checked(prompt.token_ids, vocab_size))
    content: object = prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not (prompt.keys() <= {"prompt", "prompt_token_ids"}):
            raise RequestError(f"a prompt with the keys {sorted(map(str, prompt))}", where="prompt", expected=FORMS)
        ((key, content),) = prompt.items()
        if isinstance(content, str) != (key == "prompt"):
            raise RequestError(f"{key} is a {type(content).__name__}", where="prompt", expected=FORMS)
    if isinstance(content, str):
        if tokenizer is None:
            raise RequestError(
                "a text prompt for a model without a tokenizer",
                where="prompt",
                expected="{'prompt_token_ids': [...]}",
                hint="or compile the checkpoint with its tokenizer.json",
            )
        return Prompt(content, _checked(tokenizer.encode(content), vocab_size))
    if not isinstance(content, list | tuple):
        raise RequestError(f"a prompt of type {type(content).__name__}", where="prompt", expected=FORMS)
    return Prompt(None, _checked(content, vocab_size))


def _checked(token_ids: Sequence[object], vocab_size: int) -> list[int]:
    if not token_ids:
        raise RequestError("the prompt is empty", where="prompt", expected="at least one token")
    if set(map(type, token_ids)) == {int}:  # as nearly always; else one by one, a hundred times slower
        plain = cast("Sequence[int]", token_ids)
        if min(plain) >= 0 and max(plain) < vocab_size:
            return list(plain)
    checked: list[int] = []
    for index, token in enumerate(token_ids):
        if not isinstance(token, numbers.Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token!r:.40} is out of range",
                where=f"prompt_token_ids[{index}]",
                expected=f"an integer in [0, {vocab_size - 1}]",
            )
        checked.append(int(token))
    return checked
