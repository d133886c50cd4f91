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
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classified,
    embedded,
    scored,
    tensor_of,
)
from ingot.vllm_api.pooling_params import own_params
from ingot.vllm_api.prompts import read_forms, refuse_arguments
from ingot.vllm_api.refused_methods import RefusedMethods
from ingot.vllm_api.sampling_params import SamplingParams, frozen
from ingot.vllm_api.script_helpers import is_template

if TYPE_CHECKING:
    from ingot.runtime.adapters.lora_request import LoRARequest
    from ingot.runtime.engines.beams import BeamSearchOutput
    from ingot.runtime.engines.outputs import EmbeddingOutput, RequestOutput
    from ingot.runtime.params.beam_search_params import BeamSearchParams
    from ingot.runtime.params.pooling_params import PoolingParams
    from ingot.runtime.text.tokenizer import Tokenizer
    from ingot.vllm_api.model_config import ModelConfig
    from ingot.vllm_api.renderer import Renderer

_OF_TOKENS = "a model returns one vector for a prompt, and none for each token"
_CROSS = "models that read both texts of a pair at once (cross-encoders) are not supported"


class LLM(RefusedMethods):
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
        from ingot.runtime.engines.pooling_engine import PoolingEngine

        return isinstance(self._llm.llm_engine, PoolingEngine)

    @property
    def _classes(self) -> bool:
        """Whether the model's vectors are logits of classes."""
        from ingot.runtime.engines.pooling_engine import PoolingEngine

        engine = self._llm.llm_engine
        return isinstance(engine, PoolingEngine) and engine.classes

    @cached_property
    def model_config(self) -> "ModelConfig":
        """Facts about the model: its length, dtype, vocabulary, and whether it pools."""
        from ingot.vllm_api.model_config import model_config

        return model_config(self._llm)

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine. While its requests are unfinished, call no method of this object that runs requests."""
        return LLMEngine(self._llm)

    def get_tokenizer(self) -> "Tokenizer | None":
        """Return the artifact's tokenizer; None if the checkpoint had none."""
        return self._llm.get_tokenizer()

    @cached_property
    def renderer(self) -> "Renderer":
        """It turns prompts into token ids, for programs that do so before `generate`."""
        from ingot.vllm_api.renderer import Renderer

        return Renderer(self.get_tokenizer(), self.model_config.vocab_size)

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
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Complete every prompt and return the outputs in the prompts' order.

        prompts           a text, a TextPrompt, a TokensPrompt, or a list of these
        sampling_params   one for all prompts or one for each; None: `get_default_sampling_params`
        use_tqdm          whether to show a progress bar on stderr; or a callable such as `tqdm`, which makes one
        priority          with the scheduling policy "priority", a lower number is served first
        lora_request      a LoRA adapter for all prompts, or one or None for each
        others            arguments of vLLM that Ingot refuses, such as `tokenization_kwargs`

        Raises RequestError if one prompt cannot be served; then none has run.
        """
        refuse_arguments("LLM.generate", others)
        params = frozen(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        ranks = _listed(priority, prompts)
        return self._llm.generate(
            read_forms(prompts), params, use_tqdm=use_tqdm, priority=ranks, lora_request=lora_request
        )

    def beam_search(
        self,
        prompts: Any,
        params: "BeamSearchParams",
        lora_request: object = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        **others: object,
    ) -> "list[BeamSearchOutput]":
        """Return the likeliest continuations that a beam search finds for every prompt, in the prompts' order.

        prompts             as in `generate`
        use_tqdm            whether to show a progress bar of prompts on stderr; or a callable that makes one
        concurrency_limit   the most prompts that are searched at once; None: all
        others              arguments of vLLM that Ingot refuses, as `lora_request`

        Raises RequestError before anything runs if a prompt cannot be served, or if the model pools.
        """
        refuse_arguments("LLM.beam_search", {"lora_request": lora_request, **others})
        return self._llm.beam_search(
            read_forms(prompts), params, use_tqdm=use_tqdm, concurrency_limit=concurrency_limit
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **others: object,
    ) -> "list[RequestOutput]":
        """Return the assistant's next message in a conversation, or in each of a list of conversations.

        `chat_template` is a Jinja template that replaces the model's, or the path of one. The other arguments are those
        of `generate` and of `ingot.LLM.chat`. Raises RequestError if one conversation cannot be served.
        """
        refuse_arguments("LLM.chat", {"chat_template_content_format": chat_template_content_format, **others})
        from ingot.runtime.chat.template import ChatOptions

        options = ChatOptions(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        template = self._template if chat_template is None else self._read_template(chat_template)
        prompts = template.prompts(messages, options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request)

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
        self._check_kind("LLM.embed", classes=False)
        return [embedded(output) for output in self._vectors(prompts, pooling_params, use_tqdm)]

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        use_tqdm: UseTqdm = True,
        **others: object,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class for every prompt, in the prompts' order.

        The arguments are those of `embed`. Raises RequestError if the model's definition does not end in pooling of
        classes, or if one prompt cannot be served.
        """
        refuse_arguments("LLM.classify", others)
        self._check_kind("LLM.classify", classes=True)
        outputs = self._vectors(prompts, pooling_params, use_tqdm)
        several = isinstance(pooling_params, list | tuple)
        params = pooling_params if several else [pooling_params] * len(outputs)
        activate = [one is None or one.normalize is not False for one in params]  # type: ignore[union-attr]
        return [classified(output, activate=one) for output, one in zip(outputs, activate, strict=True)]

    def encode(
        self,
        prompts: Any,
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        **others: object,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what `embed` or `classify` returns, as tensors.

        pooling_task   "embed" or "classify"; None: the one that the model does

        The other arguments are those of `embed`. Raises RequestError.
        """
        if pooling_task not in (None, "embed", "classify"):
            what, hint = f"pooling_task is {pooling_task!r:.80}", _OF_TOKENS
            raise RequestError(what, where="LLM.encode", expected="'embed' or 'classify'", hint=hint)
        given: dict[str, Any] = {"pooling_params": pooling_params, "use_tqdm": use_tqdm, **others}
        if (pooling_task or ("classify" if self._classes else "embed")) == "classify":
            return [tensor_of(one, one.outputs.probs) for one in self.classify(prompts, **given)]
        return [tensor_of(one, one.outputs.embedding) for one in self.embed(prompts, **given)]

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
        if self._classes:
            raise RequestError("the model returns logits of classes", where="LLM.score", hint=_CROSS)
        left, right = _texts(data_1), _texts(data_2)
        if len(left) not in (1, len(right)) or not right:
            raise RequestError(
                f"{len(left)} texts and {len(right)} texts", where="LLM.score", expected="one and several, or as many"
            )
        outputs = self._vectors([*left, *right], pooling_params, use_tqdm)
        first = outputs[: len(left)] * (len(right) if len(left) == 1 else 1)
        return [scored(one, other) for one, other in zip(first, outputs[len(left) :], strict=True)]

    def reward(self, prompts: Any, **others: object) -> None:
        """Refuse the call: no model here returns a reward for each token. Raises RequestError."""
        hint = f"{_OF_TOKENS}; for a reward for each prompt, call encode with pooling_task='classify'"
        raise RequestError("rewards of tokens are not supported", where="LLM.reward", hint=hint)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices, which is 1."""
        return 1

    def reset_prefix_cache(self, **others: object) -> bool:
        """Forget all cached prefixes and return True. While requests run, change nothing and return False."""
        refuse_arguments("LLM.reset_prefix_cache", others)
        return self._llm.reset_prefix_cache()

    def _check_kind(self, where: str, *, classes: bool) -> None:
        """Raise RequestError if the model pools, but not what the method `where` returns: classes, or embeddings."""
        if self._pools and self._classes != classes:
            has, call = ("logits of classes", "classify") if self._classes else ("embedding vectors", "embed")
            raise RequestError(f"the model returns {has}", where=where, hint=f"call {call}")

    def _vectors(self, prompts: Any, pooling_params: Any, use_tqdm: UseTqdm) -> "list[EmbeddingOutput]":
        """Return the outputs of `ingot.LLM.embed`. While it runs, show a progress bar if `use_tqdm` says so."""
        total = len(prompts) if isinstance(prompts, list | tuple) else 1
        bar = progress(use_tqdm, total, "Processed prompts")
        try:
            outputs = self._llm.embed(read_forms(prompts), own_params(pooling_params, classes=self._classes))
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
        folder, renderer = self._llm.loaded.artifact.tokenizer, Renderer()
        if given is None:
            return ChatTemplate(folder, tokenizer, renderer)
        if not is_template(given):
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
