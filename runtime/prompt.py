"""What a caller may give as a prompt, checked and turned into token ids."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ingot.ir.errors import RequestError
from ingot.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, or None when token ids were given, and its token ids, at least one.

    What the prefix cache keeps of it is found by prompts of the same `cache_salt` alone.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


PromptLike = str | Sequence[int] | Mapping[str, object] | Prompt

FORMS = (
    "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}, there with a 'cache_salt' or without"
)


def read_prompt(prompt: PromptLike, tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    """Check a prompt; `vocab_size` is that of the model. Raises RequestError."""
    if isinstance(prompt, Prompt):  # a chat's
        return Prompt(prompt.text, _checked(prompt.token_ids, vocab_size), _salt(prompt.cache_salt))
    content: object = prompt
    salt: str | None = None
    if isinstance(prompt, Mapping):
        given = dict(prompt)
        salt = _salt(given.pop("cache_salt", None))
        if len(given) != 1 or not (given.keys() <= {"prompt", "prompt_token_ids"}):
            raise RequestError(f"a prompt with the keys {sorted(map(str, prompt))}", where="prompt", expected=FORMS)
        ((key, content),) = given.items()
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
        return Prompt(content, _checked(tokenizer.encode(content), vocab_size), salt)
    if not isinstance(content, list | tuple):
        raise RequestError(f"a prompt of type {type(content).__name__}", where="prompt", expected=FORMS)
    return Prompt(None, _checked(content, vocab_size), salt)


def _salt(salt: object) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt is {salt!r:.80}", where="prompt", expected="a text that is not empty")
    return salt


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
