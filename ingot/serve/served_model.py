"""The model as the server process sees it: limits, tokenizer, chat template, defaults. It needs no torch."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ingot.ir.artifact.manifest_file import MANIFEST, tokenizer_folder
from ingot.ir.errors import ArtifactError, IngotError, RequestError
from ingot.runtime.chat.files import read_template, read_templates
from ingot.runtime.chat.renderer import Renderer
from ingot.runtime.chat.template import ChatOptions, ChatTemplate
from ingot.runtime.params.prompt import Prompt, PromptLike, read_prompts
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer, read_json
from ingot.serve.default_params import OF_MODEL, chosen_sampling_params

Value = TypeVar("Value")
_FACTS = ("model", "target", "versions", "request_key")


@dataclass(frozen=True)
class ServedModel:
    """An artifact's model without its weights.

    artifact        the artifact folder
    name            the name in its manifest
    max_seq_len     most tokens of a sequence, prompt and output together
    page_size       tokens of a page of the KV cache
    device          what it was compiled for: "cpu" or "cuda"
    tokenizer       None if the checkpoint had none
    defaults        SamplingParams with the values of generation_config.json
    chat_template   a Jinja file that replaces the artifact's chat template; None: the artifact's
    facts           the manifest's parts "model", "target", "versions" and "request_key", as in `Manifest`
    eos_token_ids   the model's end tokens
    """

    artifact: Path
    name: str
    vocab_size: int
    max_seq_len: int
    page_size: int
    device: str
    tokenizer: Tokenizer | None
    defaults: SamplingParams
    chat_template: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def open(
        cls, artifact: Path, chat_template: Path | None = None, generation_config: str = OF_MODEL
    ) -> "ServedModel":
        """Read an artifact's manifest and tokenizer. The engine checks the artifact's digests.

        `generation_config` is the source of `defaults`, as in `chosen_sampling_params`. Raises ArtifactError, or
        OptionError if there is no such source.
        """
        where = artifact / MANIFEST
        try:
            manifest = json.loads(where.read_bytes())
            model = manifest["model"]
            vocab_size, max_seq_len = int(model["vocab_size"]), int(model["max_seq_len"])
            page_size, device = int(model["page_size"]), str(manifest["target"]["device"])
            eos = [int(token) for token in str(model["eos_token_ids"]).split(",") if token]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArtifactError(f"the manifest cannot be read: {error!r:.200}", where=str(where)) from None
        folder = tokenizer_folder(artifact)
        tokenizer = Tokenizer.load(folder, eos) if (folder / "tokenizer.json").is_file() else None
        defaults = chosen_sampling_params(artifact, generation_config)
        name, facts = str(manifest["name"]), {part: manifest.get(part) for part in _FACTS}
        ends = frozenset(eos if tokenizer is None else tokenizer.eos_token_ids)
        sizes = vocab_size, max_seq_len, page_size
        return cls(artifact, name, *sizes, device, tokenizer, defaults, chat_template, facts, ends)

    def read_prompts(self, prompts: list[PromptLike]) -> list[Prompt]:
        """Check prompts and convert texts to token ids. Raises RequestError."""
        return read_prompts(prompts, self.tokenizer, self.vocab_size)

    def render(self, messages: object, options: ChatOptions) -> Prompt:
        """Render one conversation with the chat template. This waits for the process that renders templates.

        Raises RequestError, or ArtifactError for an invalid template."""
        if isinstance(messages, list) and messages and isinstance(messages[0], list):
            raise RequestError("a list of conversations", where="messages", expected="one list of messages")
        (prompt,) = self._chat.prompts(messages, options)
        return prompt

    def check_chat_template(self) -> None:
        """Raise ArtifactError if the chat template is malformed. A model without one is no error."""
        if self.tokenizer is not None and self.chat_template is not None:
            self._chat  # noqa: B018 - reads it

    @cached_property
    def has_chat_template(self) -> bool:
        """Return whether conversations can be rendered: there is a tokenizer, and a chat template that can be read."""
        folder = tokenizer_folder(self.artifact)
        try:
            return self.tokenizer is not None and bool(
                self.chat_template or read_templates(folder, read_json(folder / "tokenizer_config.json"))
            )
        except IngotError:
            return False

    @cached_property
    def template_text(self) -> str:
        """Return the text of all chat templates of the model; "" if conversations cannot be rendered."""
        if not self.has_chat_template:
            return ""
        folder = tokenizer_folder(self.artifact)
        if self.chat_template is not None:
            templates = read_template(self.chat_template)
        else:
            templates = read_templates(folder, read_json(folder / "tokenizer_config.json"))
        return "\n".join(template.source for template in templates.values())

    @cached_property
    def _chat(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise RequestError("a chat with a model without a tokenizer", expected="an artifact with a tokenizer")
        return ChatTemplate(tokenizer_folder(self.artifact), self.tokenizer, Renderer(), self.chat_template)


class TextThreads:
    """Threads for work on text that would stop the event loop: long prompts, and chat templates."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="ingot-text")

    async def run(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Call `function` with `arguments` in a thread, and return its value or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
