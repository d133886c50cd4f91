"""Checks of callers' prompts, and their conversion to token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from ingot.ir.errors import RequestError
from ingot.runtime.params.given_numbers import as_integer
from ingot.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been checked.

    text         the prompt's text; None if the caller passed token ids
    token_ids    its tokens, at least one
    cache_salt   only prompts with an equal salt share pages of the prefix cache; None: no salt
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


PromptLike = str | Sequence[int] | Mapping[str, object] | Prompt

FORMS = (
    "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}, the last two optionally with a"
    " 'cache_salt'"
)


def read_prompts(prompts: Sequence[PromptLike], tokenizer: Tokenizer | None, vocab_size: int) -> list[Prompt]:
    """Check the prompts that a caller passed, and encode texts with `tokenizer`. Raises RequestError for a malformed
    prompt, and for a token id that is not below `vocab_size`. Raises it too for a text if `tokenizer` is None."""
    forms = [_form(prompt, with_texts=tokenizer is not None) for prompt in prompts]
    texts = [form.content for form in forms if isinstance(form.content, str)]
    encoded = iter([] if tokenizer is None else tokenizer.encode_all(texts))
    read: list[Prompt] = []
    for form in forms:
        token_ids = next(encoded) if isinstance(form.content, str) else form.content
        read.append(Prompt(form.text, _checked(token_ids, vocab_size), form.salt))
    return read


class _Form(NamedTuple):
    """The parts of a caller's prompt.

    text      the text; None if the caller passed token ids
    content   the model's input: token ids, or a text that is still to be encoded
    salt      the salt for the prefix cache, or None
    """

    text: str | None
    content: str | Sequence[object]
    salt: str | None


def _form(prompt: PromptLike, *, with_texts: bool) -> _Form:
    if isinstance(prompt, Prompt):  # a chat's
        return _Form(prompt.text, prompt.token_ids, _salt(prompt.cache_salt))
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
        if not with_texts:
            raise RequestError(
                "a text prompt for a model without a tokenizer",
                where="prompt",
                expected="{'prompt_token_ids': [...]}",
                hint="or compile the checkpoint with its tokenizer.json",
            )
        return _Form(content, content, salt)
    if not isinstance(content, list | tuple):
        raise RequestError(f"a prompt of type {type(content).__name__}", where="prompt", expected=FORMS)
    return _Form(None, content, salt)


def _salt(salt: object) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt is {salt!r:.80}", where="prompt", expected="a text that is not empty")
    return salt


def _checked(token_ids: Sequence[object], vocab_size: int) -> list[int]:
    if not token_ids:
        raise RequestError("the prompt is empty", where="prompt", expected="at least one token")
    if set(map(type, token_ids)) == {int}:  # the usual case; the loop below is a hundred times slower
        plain = cast("Sequence[int]", token_ids)
        if min(plain) >= 0 and max(plain) < vocab_size:
            return list(plain)
    checked: list[int] = []
    for index, token in enumerate(token_ids):
        number = as_integer(token)
        if number is None or not 0 <= number < vocab_size:
            raise RequestError(
                f"token id {token!r:.40} is out of range",
                where=f"prompt_token_ids[{index}]",
                expected=f"an integer in [0, {vocab_size - 1}]",
            )
        checked.append(number)
    return checked
