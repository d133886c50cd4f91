"""vLLM's types of prompts, and the arguments of a call that Ingot refuses."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from ingot.ir.errors import RequestError
from ingot.runtime.params.prompt import Prompt


class TextPrompt(TypedDict):
    """A prompt of text. Only prompts with an equal `cache_salt` share cached pages."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids. `prompt` is their text, which outputs repeat. Only prompts with an equal `cache_salt`
    share cached pages."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


def read_forms(prompts: Any) -> Any:
    """Return vLLM's prompt, or a list of them, as Ingot's. Keys whose value is None are left out. The engine checks the
    rest."""
    if isinstance(prompts, list | tuple):
        return [read_forms(one) if isinstance(one, Mapping) else one for one in prompts]
    if not isinstance(prompts, Mapping):
        return prompts
    given = {name: value for name, value in prompts.items() if value is not None}
    if given.keys() - {"cache_salt"} == {"prompt", "prompt_token_ids"} and isinstance(given["prompt"], str):
        return Prompt(given["prompt"], given["prompt_token_ids"], given.get("cache_salt"))
    return given


# Arguments of vLLM's `generate`, `chat`, `embed` and `add_request` that have no meaning here, with the reason.
_REFUSED = {
    "lora_request": "adapters change generated tokens only, and not those of a beam search",
    "tokenization_kwargs": "the artifact's tokenizer has no options for a call; pass token ids",
    "mm_processor_kwargs": "models take text only",
    "prompt_embeds": "prompts are texts or token ids",
    "trace_headers": "requests are not traced",
    "chat_template_content_format": "messages are passed as their chat template expects them",
    "reset_running_requests": "unfinished requests keep their pages",
    "reset_connector": "KV caches are not stored elsewhere",
}


def refuse_arguments(where: str, arguments: dict[str, object]) -> None:
    """Raise RequestError for an argument of a call that Ingot does not support, with the reason.

    where       the name of the method, for the message
    arguments   name -> value. None, False, "auto", and an empty list or dict mean that the argument is not used.
    """
    for name, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        if all(one is None or one is False or one in ("auto", {}) for one in values):
            continue
        if name not in _REFUSED:
            raise RequestError(f"unknown argument '{name}'", where=where, expected=", ".join(_REFUSED))
        raise RequestError(f"{name} is not supported", where=where, expected=f"no {name}", hint=_REFUSED[name])
