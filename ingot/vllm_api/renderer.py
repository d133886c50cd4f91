"""vLLM's renderer of prompts: a program tokenizes prompts itself, and passes the results to `generate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.ir.errors import RequestError
from ingot.runtime.params.prompt import Prompt, read_prompts
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.vllm_api.model_config import ModelConfig
from ingot.vllm_api.prompts import TextPrompt, TokensPrompt, read_forms


@dataclass(frozen=True)
class TokenizeParams:
    """How to tokenize prompts.

    add_special_tokens       whether a text gets the tokens that the tokenizer adds
    truncate_prompt_tokens   keep only that many last tokens, at least 1; None: all
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        most = self.truncate_prompt_tokens
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            where = "TokenizeParams.truncate_prompt_tokens"
            raise RequestError(
                f"truncate_prompt_tokens is {most!r:.80}", where=where, expected="an integer >= 1, or None"
            )

    def with_kwargs(self, **changed: Any) -> "TokenizeParams":
        """Return parameters with some fields changed. Raises RequestError for fields of vLLM that are not here."""
        for name in changed.keys() - vars(self).keys():
            raise RequestError(f"{name} is not supported", where="TokenizeParams", expected=", ".join(vars(self)))
        return replace(self, **changed)


class Renderer:
    """Turns prompts into token ids, by a model's tokenizer.

    tokenizer    the tokenizer; None: prompts must be token ids
    vocab_size   token ids of prompts must be below it
    """

    default_cmpl_tok_params = TokenizeParams()

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None if the checkpoint had none."""
        return self._tokenizer

    def render_cmpl(
        self, prompts: Sequence[Any], tok_params: TokenizeParams = default_cmpl_tok_params
    ) -> list[TokensPrompt]:
        """Return prompts as token ids, each for `LLM.generate`. A prompt has any form that `generate` takes.

        Raises RequestError for a malformed prompt.
        """
        forms = [self._plain(one) if not tok_params.add_special_tokens else one for one in read_forms(list(prompts))]
        rendered: list[TokensPrompt] = []
        for prompt in read_prompts(forms, self._tokenizer, self._vocab_size):
            made = TokensPrompt(prompt_token_ids=prompt.token_ids[-(tok_params.truncate_prompt_tokens or 0) :])
            if prompt.text is not None:
                made["prompt"] = prompt.text
            if prompt.cache_salt is not None:
                made["cache_salt"] = prompt.cache_salt
            rendered.append(made)
        return rendered

    def _plain(self, prompt: Any) -> Any:
        """Return a text prompt as token ids without the tokens that the tokenizer adds, and others unchanged."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str) or self._tokenizer is None:
            return prompt
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        return Prompt(text, self._tokenizer.encode_plain(text), salt)


def parse_model_prompt(model_config: ModelConfig, prompt: Any) -> Any:
    """Return a prompt as a dict: a TextPrompt or a TokensPrompt. `model_config` has no effect here.

    Raises RequestError for a prompt that is no text, list or dict.
    """
    if isinstance(prompt, str):
        return TextPrompt(prompt=prompt)
    if isinstance(prompt, list):
        return TokensPrompt(prompt_token_ids=prompt)
    if isinstance(prompt, Mapping):
        return prompt
    raise RequestError(f"a prompt of type {type(prompt).__name__}", where="prompt", expected="a text, a list or a dict")
