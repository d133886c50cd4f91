"""`AsyncLLM`: generate tokens from asyncio. The engine runs in a process of its own, and this one imports no torch."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ingot.ir.artifact.manifest_file import is_artifact, mesh_in
from ingot.ir.errors import IngotError, OptionError, RequestError
from ingot.ir.mesh import parse_mesh, world_size
from ingot.runtime.adapters.lora_request import LoRARequest
from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.engines.beams import BeamSearch, BeamSearchOutput, check_room
from ingot.runtime.engines.growing import SoFar
from ingot.runtime.engines.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from ingot.runtime.params.beam_search_params import BeamSearchParams
from ingot.runtime.params.given_numbers import as_integer
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt, PromptLike
from ingot.runtime.params.sampling_params import SamplingParams, changed_fields
from ingot.serve.async_beams import AsyncBeamSearch, by_token
from ingot.serve.default_params import OF_MODEL
from ingot.serve.engine.client import EngineClient, EngineLimits
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import Delta
from ingot.serve.engine.options import ENGINE_OPTIONS
from ingot.serve.engine.place import find_places
from ingot.serve.engine.replicas import Replicas
from ingot.serve.engine.served_engine import ServedEngine
from ingot.serve.engine.vector_answer import VectorAnswer
from ingot.serve.engine.vector_values import vector_values
from ingot.serve.executor_backend import ON_THIS_HOST, check_executor_backend
from ingot.serve.find_artifact import find_artifact
from ingot.serve.mesh_sizes import with_mesh
from ingot.serve.served_model import ServedModel, TextThreads

# A longer text is tokenized in a thread. This length takes 1 ms with pico's tokenizer, in which no stream advances.
_LONG_TEXT = 4_000


class AsyncLLM:
    """A language model that generates tokens, or embeds prompts, for concurrent callers of one event loop.

    `model`, `revision` and `quantize` are as in `LLM`; a checkpoint is compiled by the constructor. `chat_template` is
    a Jinja file that replaces the model's chat template. `generation_config` says where the sampling parameters of
    requests without any come from: "auto" is the model, "none" no file, else it is a folder with a
    generation_config.json.
    `limits` bounds the queue and the restarts of the engine. `replicas` is the number of engine processes, each with a
    GPU of its own, or with a share of the cores; requests with a common prefix go to the same one. `lora_modules` maps
    names to the folders of LoRA adapters. `options` are the other arguments of `LLM`.

        async with AsyncLLM("build/pico.ingot") as llm:
            async for output in llm.generate("def f", SamplingParams(max_tokens=8), "request-0"):
                print(output.outputs[0].text)

    When the engine process dies, requests in flight raise EngineDeadError, and it is started again, with the same
    arguments. Raises IngotError if the model cannot be compiled or loaded.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        quantize: str | None = None,
        chat_template: Path | None = None,
        generation_config: str = OF_MODEL,
        limits: EngineLimits | None = None,
        replicas: int = 1,
        lora_modules: Mapping[str, Path] | None = None,
        **options: Any,
    ) -> None:
        if as_integer(replicas) is None or replicas < 1:
            raise OptionError(f"replicas is {replicas!r:.80}", expected="an integer of at least 1")
        compile_options = {name: value for name, value in options.items() if name not in ENGINE_OPTIONS}
        if revision is not None:
            compile_options["revision"] = revision
        if quantize is not None:
            compile_options["quantize"] = quantize
        if options.get("enable_lora") and not is_artifact(model):
            compile_options.setdefault("max_loras", 1)  # vLLM's default
        path = find_artifact(model, with_mesh(model, compile_options))
        self.model = ServedModel.open(path, chat_template, generation_config)
        self.model.check_chat_template()
        if (longest := options.get("max_model_len")) is not None:  # the engine refuses a bad one
            self.model = replace(self.model, max_seq_len=longest)
        engine_options = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
        adapters = {name: str(folder) for name, folder in (lora_modules or {}).items()}
        self.engine = make_engine(self.model, engine_options, limits or EngineLimits(), replicas, adapters)
        self._threads = TextThreads()
        self._open: dict[str, DeltaStream] = {}

    async def start(self) -> None:
        """Start the engine, and wait until it has loaded the model. Raises IngotError if it cannot."""
        await self.engine.start()

    async def close(self) -> None:
        """End the engine process. Requests in flight raise EngineDeadError."""
        await self.engine.close()
        self._threads.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of one prompt so far, whenever it has grown; the last one is finished.

        The arguments are as in `LLM.generate`; `request_id` names the request for `abort`. An adapter is loaded first,
        unless it is there. A caller that is slower than the engine gets fewer outputs. Leaving the iterator or
        cancelling its task aborts the request.
        Raises RequestError if it cannot be served, QueueFullError if too many requests wait, EngineDeadError if the
        engine is not running.
        """
        params = self.model.defaults if sampling_params is None else sampling_params
        if request_id is not None and request_id in self._open:
            raise RequestError(f"request id '{request_id}' is in use", expected="an id of its own")
        read = await self.read_prompt(prompt)
        adapter = None
        if lora_request is not None:
            adapter = lora_request.lora_name
            if self.engine.adapters.get(adapter) != lora_request.lora_path:
                await self.load_adapter(adapter, lora_request.lora_path)
        stream = self.submit(read, params, priority=priority, adapter=adapter)
        output = _Growing(request_id or "", read, params)
        if request_id is not None:
            self._open[request_id] = stream
        try:
            async for deltas in stream:
                yield output.grown(deltas)
        finally:
            stream.close()
            if request_id is not None:
                del self._open[request_id]

    async def beam_search(self, prompt: PromptLike, params: BeamSearchParams, priority: int = 0) -> BeamSearchOutput:
        """Return the likeliest continuations of one prompt that a beam search finds. The arguments are as in
        `LLM.beam_search`.

        Other requests run at the same time. Cancelling the task ends the search. Raises RequestError if it cannot be
        served, QueueFullError if too many requests wait for one of its steps, EngineDeadError if the engine is not
        running.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"beam search parameters of type {type(params).__name__}", expected="BeamSearchParams")
        running = self.open_beam_search(await self.read_prompt(prompt), params, priority=priority)
        try:
            await running.run()
        finally:
            running.close()
        return await self._threads.run(running.search.result, self.model.tokenizer)

    async def embed(
        self, prompt: PromptLike, pooling_params: PoolingParams | None = None, request_id: str = "", priority: int = 0
    ) -> EmbeddingOutput:
        """Return the vector of a prompt, from a model that pools. The arguments are as in `LLM.embed`.

        Cancelling the task aborts the request. Raises RequestError if the request cannot be served, QueueFullError if
        too many requests wait, EngineDeadError if the engine is not running.
        """
        read = await self.read_prompt(prompt)
        answer = self.submit_pooling(read, pooling_params or PoolingParams(), priority=priority)
        try:
            vector = await answer.vector()
        finally:
            answer.close()
        assert vector is not None  # it was not closed
        values = vector_values(vector)
        reason, stop, cached = vector.finish_reason, vector.stop_reason, vector.num_cached
        return EmbeddingOutput(request_id, read.text, read.token_ids, values, True, reason, stop, cached)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends. Its pages are free after the step in flight. Ignores an unknown id."""
        if stream := self._open.get(request_id):
            stream.close()

    async def read_prompt(self, prompt: PromptLike) -> Prompt:
        """Return a prompt as token ids. Raises RequestError."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _LONG_TEXT:
            (read,) = await self._threads.run(self.model.read_prompts, [prompt])
        else:
            (read,) = self.model.read_prompts([prompt])
        return read

    async def read_prompts(self, prompts: Sequence[PromptLike]) -> list[Prompt]:
        """Return prompts as token ids. Raises RequestError."""
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > _LONG_TEXT:
            return await self._threads.run(self.model.read_prompts, list(prompts))
        return self.model.read_prompts(list(prompts))

    async def render(self, messages: object, options: ChatOptions) -> Prompt:
        """Return a conversation as a prompt, by the chat template. Raises RequestError."""
        return await self._threads.run(self.model.render, messages, options)

    async def prepare_chats(self) -> None:
        """Start the process that renders chat templates, so that the first chat does not wait for it. A model that has
        no chat template, or a bad one, is no error here: the first chat reports it."""
        with contextlib.suppress(IngotError):
            await self.render([{"role": "user", "content": "a"}], ChatOptions())

    async def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter while requests run. Raises AdapterError if it cannot be used, and EngineDeadError."""
        await self.engine.load_adapter(name, str(folder))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that use it run to their end. Raises AdapterError for an unknown name."""
        await self.engine.unload_adapter(name)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = True,
        priority: int = 0,
        adapter: str | None = None,
    ) -> DeltaStream:
        """Send a request to the engine and return the stream of its deltas, from which `generate` builds outputs.

        With `stream`, a delta follows each step; without, one for each sequence at its end. `adapter` names a LoRA
        adapter that is loaded. The caller closes the stream if it leaves early. Raises QueueFullError if too many
        requests wait, EngineDeadError if the engine is not running.
        """
        return self.engine.add(
            prompt.token_ids,
            changed_fields(params),
            params.n,
            stream=stream,
            priority=priority,
            cache_salt=prompt.cache_salt,
            adapter=adapter,
        )

    def open_beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, priority: int = 0, adapter: str | None = None
    ) -> AsyncBeamSearch:
        """Return the beam search of a prompt, which has not begun. The caller runs it, and closes it in any case.

        `adapter` names a LoRA adapter that is loaded. Raises RequestError if the prompt leaves no room for a token.
        """
        check_room(prompt, self.model.max_seq_len, "prompt")
        search = BeamSearch(prompt, params, self.model.eos_token_ids, self.model.max_seq_len)
        return AsyncBeamSearch(self, search, params, priority, adapter)

    def submit_pooling(self, prompt: Prompt, params: PoolingParams, *, priority: int = 0) -> VectorAnswer:
        """Send a request for the vector of a prompt, and return its answer. The caller closes it if it leaves early.

        Raises QueueFullError if too many requests wait, EngineDeadError if the engine is not running.
        """
        changed = {name: value for name, value in vars(params).items() if value is not None}
        return self.engine.pool(prompt.token_ids, changed, priority=priority, cache_salt=prompt.cache_salt)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False if requests run, and nothing has changed. Raises EngineDeadError."""
        return await self.engine.reset_prefix_cache()


def make_engine(
    model: ServedModel,
    options: dict[str, Any],
    limits: EngineLimits,
    replicas: int,
    adapters: dict[str, str] | None = None,
) -> ServedEngine:
    """Return the engines of a model, which are not started yet: one, or several replicas.

    options    the arguments of `LLM` that each engine gets
    adapters   name -> folder of the LoRA adapters that each engine loads

    Raises OptionError if there are fewer GPUs, or cores, than replicas, or for replicas on several hosts.
    """
    backend = options.get("distributed_executor_backend", ON_THIS_HOST)
    check_executor_backend(backend)
    if replicas == 1:
        return EngineClient(model.artifact, options, limits, adapters)
    ranks = world_size(parse_mesh(mesh_in(model.artifact)))
    if backend != ON_THIS_HOST:
        raise OptionError(
            f"replicas is {replicas}, and distributed_executor_backend is '{backend}'",
            expected="one of the two",
            hint="start a server for each replica",
        )
    places = find_places(replicas, model.device, ranks)
    return Replicas(model.artifact, options, limits, places, model.page_size, adapters)


class _Growing:
    """The output of a request so far, built from deltas. Outputs share its lists, as views that do not change."""

    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        self._request_id, self._prompt = request_id, prompt
        self._sequences = [_GrowingSequence(index, params.logprobs is not None) for index in range(params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = []
        self._num_cached: int | None = None

    def grown(self, deltas: list[Delta]) -> RequestOutput:
        """Add deltas, and return the output so far."""
        for delta in deltas:
            self._sequences[delta.index].add(delta)
            if delta.prompt_logprobs is not None and self._prompt_logprobs is not None:
                self._prompt_logprobs += [None if one is None else by_token(one) for one in delta.prompt_logprobs]
            if delta.num_cached is not None:
                self._num_cached = delta.num_cached
        outputs = [one.output() for one in self._sequences]
        return RequestOutput(
            self._request_id,
            self._prompt.text,
            self._prompt.token_ids,
            outputs,
            all(one.finished for one in outputs),
            None if self._prompt_logprobs is None else SoFar(self._prompt_logprobs),
            self._num_cached,
        )


class _GrowingSequence:
    def __init__(self, index: int, has_logprobs: bool) -> None:
        self._index = index
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self._cumulative = 0.0
        self._end: tuple[Any, int | str | None] = (None, None)

    def add(self, delta: Delta) -> None:
        self._token_ids += delta.token_ids
        self._text += delta.text
        if self._logprobs is not None:
            for entry in delta.logprobs or ():
                self._logprobs.append(by_token(entry))
                self._cumulative += entry[0][1]
        self._end = delta.finish_reason, delta.stop_reason

    def output(self) -> CompletionOutput:
        logprobs = self._logprobs
        return CompletionOutput(
            self._index,
            self._text,
            SoFar(self._token_ids),
            None if logprobs is None else self._cumulative,
            None if logprobs is None else SoFar(logprobs),
            *self._end,
        )
