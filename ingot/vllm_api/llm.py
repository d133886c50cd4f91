"""vLLM's `LLM`, made of `ingot.LLM`."""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.ir.errors import OptionError, RequestError
from ingot.serve.llm import LLM as IngotLLM
from ingot.serve.progress import UseTqdm, progress
from ingot.vllm_api.engine_args import EngineArgs
from ingot.vllm_api.llm_engine import LLMEngine
from ingot.vllm_api.outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    embedded,
    scored,
)
from ingot.vllm_api.prompts import read_forms, refuse_arguments
from ingot.vllm_api.sampling_params import SamplingParams, frozen

if TYPE_CHECKING:
    from ingot.runtime.outputs import EmbeddingOutput, RequestOutput
    from ingot.runtime.pooling_params import PoolingParams
    from ingot.runtime.tokenizer import Tokenizer

_NO_CLASSES = "the model has no classifier; definitions that end in pooling return a vector, which embed returns"


class LLM:
    """A model, with vLLM's arguments and methods. `EngineArgs` describes the arguments.

    The constructor raises IngotError if the model cannot be compiled or loaded, and for an argument that has no meaning
    for Ingot.
    """

    def __init__(self, model: Any, *, chat_template: str | Path | None = None, **arguments: Any) -> None:
        self._open(EngineArgs(model=model, chat_template=chat_template, **arguments))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Return the model that `engine_args` describe. Raises IngotError."""
        made = cls.__new__(cls)
        made._open(engine_args)
        return made

    def _open(self, args: EngineArgs) -> None:
        from ingot.vllm_api.open_model import open_model

        self._args = args
        self._llm: IngotLLM = open_model(args)
        if args.runner == "pooling" and not self._pools:
            raise OptionError(
                "runner is 'pooling', and the model generates tokens",
                where="EngineArgs.runner",
                expected="a model whose definition ends in pooling",
            )

    @property
    def _pools(self) -> bool:
        from ingot.runtime.pooling_engine import PoolingEngine

        return isinstance(self._llm.llm_engine, PoolingEngine)

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine. While its requests are unfinished, call no method of this object that runs requests."""
        return LLMEngine(self._llm)

    def get_tokenizer(self) -> "Tokenizer | None":
        """Return the artifact's tokenizer; None if the checkpoint had none."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: the checkpoint's, with those of `override_generation_config`.

        Their fields can be set. With generation_config="vllm", they are the defaults of the class instead.
        """
        fields = {} if self._args.generation_config == "vllm" else vars(self._llm.get_default_sampling_params())
        changed = dict(self._args.override_generation_config or {})
        if "max_new_tokens" in changed:  # the name in generation_config.json
            changed["max_tokens"] = changed.pop("max_new_tokens")
        return SamplingParams(**{**fields, **changed})

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Complete every prompt and return the outputs in the prompts' order.

        prompts           a text, a TextPrompt, a TokensPrompt, or a list of these
        sampling_params   one for all prompts or one for each; None: `get_default_sampling_params`
        use_tqdm          whether to show a progress bar on stderr; or a callable such as `tqdm`, which makes one
        priority          with the scheduling policy "priority", a lower number is served first
        others            arguments of vLLM that Ingot refuses, such as `lora_request`

        Raises RequestError if one prompt cannot be served; then none has run.
        """
        refuse_arguments("LLM.generate", others)
        params = frozen(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        return self._llm.generate(read_forms(prompts), params, use_tqdm=use_tqdm, priority=_listed(priority, prompts))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Return the assistant's next message in a conversation, or in each of a list of conversations.

        `chat_template` is a Jinja template that replaces the model's, or the path of one. The other arguments are those
        of `generate` and of `ingot.LLM.chat`. Raises RequestError if one conversation cannot be served.
        """
        refuse_arguments("LLM.chat", others)
        from ingot.runtime.chat.template import ChatOptions

        options = ChatOptions(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        template = self._template if chat_template is None else self._read_template(chat_template)
        prompts = template.prompts(messages, options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        **others: object,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding vector of every prompt, in the prompts' order.

        The arguments are those of `generate`; `pooling_params` are one for all prompts or one for each. Raises
        RequestError if the model generates tokens, or if one prompt cannot be served.
        """
        refuse_arguments("LLM.embed", others)
        return [embedded(output) for output in self._vectors(prompts, pooling_params, use_tqdm)]

    def encode(
        self,
        prompts: Any,
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        **others: object,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the embedding vector of every prompt as a tensor. `pooling_task` may be "embed" only.

        The other arguments are those of `embed`. Raises RequestError.
        """
        import torch

        if pooling_task not in (None, "embed"):
            raise RequestError(
                f"pooling_task is {pooling_task!r:.80}", where="LLM.encode", expected="'embed'", hint=_NO_CLASSES
            )
        found = self.embed(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm, **others)
        return [
            PoolingRequestOutput(
                one.request_id,
                PoolingOutput(torch.tensor(one.outputs.embedding)),
                one.prompt_token_ids,
                one.num_cached_tokens,
            )
            for one in found
        ]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: "PoolingParams | None" = None,
        **others: object,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarity of the embedding vectors of each pair of texts.

        data_1   one text for all pairs, or a list with one for each text of `data_2`
        data_2   a text or a list of texts

        The other arguments are those of `embed`. Raises RequestError if the numbers of texts differ, if the model
        generates tokens, or if one text cannot be served.
        """
        refuse_arguments("LLM.score", others)
        left, right = _texts(data_1), _texts(data_2)
        if len(left) not in (1, len(right)) or not right:
            raise RequestError(
                f"{len(left)} texts and {len(right)} texts", where="LLM.score", expected="one and several, or as many"
            )
        outputs = self._vectors([*left, *right], pooling_params, use_tqdm)
        first = outputs[: len(left)] * (len(right) if len(left) == 1 else 1)
        return [scored(one, other) for one, other in zip(first, outputs[len(left) :], strict=True)]

    def classify(self, prompts: Any, **others: object) -> None:
        """Refuse the call: no model here has a classifier. Raises RequestError."""
        raise RequestError("classification is not supported", where="LLM.classify", hint=_NO_CLASSES)

    def reward(self, prompts: Any, **others: object) -> None:
        """Refuse the call: no model here returns rewards. Raises RequestError."""
        raise RequestError("rewards are not supported", where="LLM.reward", hint=_NO_CLASSES)

    def reset_prefix_cache(self, **others: object) -> bool:
        """Forget all cached prefixes and return True. While requests run, change nothing and return False."""
        refuse_arguments("LLM.reset_prefix_cache", others)
        return self._llm.reset_prefix_cache()

    def _vectors(self, prompts: Any, pooling_params: Any, use_tqdm: UseTqdm) -> "list[EmbeddingOutput]":
        """Return the outputs of `ingot.LLM.embed`. While it runs, show a progress bar if `use_tqdm` says so."""
        total = len(prompts) if isinstance(prompts, list | tuple) else 1
        bar = progress(use_tqdm, total, "Processed prompts")
        try:
            outputs = self._llm.embed(read_forms(prompts), pooling_params)
            bar.update(total)
        finally:
            bar.close()
        return outputs

    @cached_property
    def _template(self) -> Any:
        """The chat template for conversations: the model's, or the one that the constructor got."""
        given = self._args.chat_template
        return self._read_template(None if given is None else str(given))

    def _read_template(self, given: str | None) -> Any:
        """Return a chat template: the model's for None, else a Jinja template or the one in a file of that path.

        Raises RequestError, or ArtifactError for a template that is malformed.
        """
        from ingot.runtime.chat.renderer import Renderer
        from ingot.runtime.chat.template import ChatTemplate

        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise RequestError("a chat with a model without a tokenizer", expected="an artifact with a tokenizer")
        folder, renderer = self._llm.loaded.artifact.folder / "tokenizer", Renderer()
        if given is None:
            return ChatTemplate(folder, tokenizer, renderer)
        if not any(mark in given for mark in "{}\n"):  # a path has none of these
            return ChatTemplate(folder, tokenizer, renderer, Path(given))
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / "chat_template.jinja"
            file.write_text(given, encoding="utf-8")
            return ChatTemplate(folder, tokenizer, renderer, file)


def _listed(priority: int | Sequence[int] | None, prompts: Any) -> Sequence[int] | None:
    """Return one priority for each prompt; `priority` may be one number for all."""
    if not isinstance(priority, int):
        return priority
    return [priority] * (len(prompts) if isinstance(prompts, list | tuple) else 1)


def _texts(data: Any) -> list[Any]:
    return list(data) if isinstance(data, list | tuple) else [data]
