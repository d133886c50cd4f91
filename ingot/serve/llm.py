"""`LLM`: serve an artifact, or a checkpoint that is compiled once, with the interface of vLLM's `LLM`.

Importing this module imports neither torch nor the engine. An `LLM` imports both, while it creates the GPU context.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.ir.artifact.manifest_file import device_of, is_artifact
from ingot.ir.errors import InternalError, RequestError
from ingot.runtime.cuda.early_context import begin_context
from ingot.runtime.loading.phases import Phases, Span, process_age
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.default_params import default_sampling_params
from ingot.serve.executor_backend import ON_THIS_HOST, begun_by
from ingot.serve.find_artifact import find_artifact
from ingot.serve.mesh_sizes import with_mesh

if TYPE_CHECKING:
    from ingot.runtime.adapters.lora_request import LoRARequest
    from ingot.runtime.chat.template import ChatTemplate
    from ingot.runtime.cuda.graphs.choice import Capture
    from ingot.runtime.engines.beams import BeamSearchOutput
    from ingot.runtime.engines.engine import Engine, EngineRequest
    from ingot.runtime.engines.outputs import EmbeddingOutput, RequestOutput
    from ingot.runtime.engines.pooling_engine import PoolingEngine
    from ingot.runtime.loading.loader import Loaded
    from ingot.runtime.pages.prefix_cache import PrefixCacheStats
    from ingot.runtime.params.beam_search_params import BeamSearchParams
    from ingot.runtime.params.pooling_params import PoolingParams
    from ingot.runtime.params.prompt import Prompt, PromptLike
    from ingot.runtime.scheduling.scheduler_config import Policy
    from ingot.runtime.text.tokenizer import Tokenizer
    from ingot.serve.progress import UseTqdm

    LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A language model that generates tokens, or embeds prompts.

    model                    an artifact folder, a checkpoint folder, or the name of a repository on the Hugging Face
                             hub: "org/name" or "org/name@REVISION". A checkpoint is compiled once, in a child process.
                             Later starts use the cached artifact
    revision                 the revision of a hub repository; default: main
    tensor_parallel_size     the number of processes that share each layer; a checkpoint is compiled for it. Default: as
                             compiled, or 1
    pipeline_parallel_size   the number of stages of layers, each with processes of its own; as above
    distributed_executor_backend
                             "mp": the processes are on this host. "ray": they are on the hosts of a Ray cluster, to
                             which this host belongs
    quantize                 the format in which the weights of a checkpoint are stored, such as "fp8"; default: as they
                             are
    memory                   the most bytes that serving may use, with weights and activations; default: all memory of
                             the machine, or nine tenths of a GPU's. The KV cache takes what is left, up to the compiled
                             limits
    num_kv_pages             the size of the KV cache in pages of `page_size` tokens, in place of `memory`
    enable_chunked_prefill   a long prompt may be split over several steps
    enable_prefix_caching    prompts with a common prefix share its KV cache pages, and copies of its convolution and
                             scan states. True raises OptionError for a model without pages; default: on if the model
                             has pages
    disable_cascade_attn     decode steps on a GPU never use cascade attention. Cascade attention reads a shared prefix
                             once for all its sequences. By default it is used where it is faster
    scheduling_policy        "fcfs", or "priority": `generate` then accepts priorities
    max_model_len            the most tokens of a sequence, prompt and output together; default: as compiled
    max_num_seqs             the most sequences in a step; default: as compiled
    max_num_batched_tokens   the most tokens in a step; default: as compiled
    max_num_mixed_tokens     the most prompt tokens in a step that also decodes a streamed request; default: 2048. A low
                             number shortens the time between the stream's tokens
    seed                     seeds the requests that have no seed
    cuda_graphs              when to capture steps on a GPU as CUDA graphs. "all": in the constructor; "need": when a
                             step of a new size comes, which takes some hundredths of a second; "idle": while the host
                             waits, and on need; "none": never
    enable_lora              requests may use LoRA adapters. A checkpoint is then compiled for `max_loras` adapters
                             (default: 1) of up to `max_lora_rank` (default: 16). Default with an artifact: as compiled
    max_cpu_loras            the most adapters that the host keeps; default: 64
    compile_options          keyword arguments of `compile_model`, for a checkpoint

    Raises IngotError if the model cannot be compiled or loaded.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        quantize: str | None = None,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        distributed_executor_backend: str = ON_THIS_HOST,
        memory: int | None = None,
        num_kv_pages: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool | None = None,
        disable_cascade_attn: bool = False,
        scheduling_policy: "Policy" = "fcfs",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_mixed_tokens: int | None = None,
        seed: int = 0,
        cuda_graphs: "Capture" = "idle",
        enable_lora: bool | None = None,
        max_cpu_loras: int | None = None,
        **compile_options: Any,
    ) -> None:
        before = process_age()
        if revision is not None:
            compile_options["revision"] = revision
        if quantize is not None:
            compile_options["quantize"] = quantize
        if enable_lora and not is_artifact(model):
            compile_options.setdefault("max_loras", 1)  # vLLM's default
        sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        path = find_artifact(model, with_mesh(model, {**compile_options, **sizes}))
        phases = Phases()
        with begun_by(distributed_executor_backend, path) as processes:
            context = begin_context(phases) if device_of(path) == "cuda" else None
            try:
                with phases.phase("engine"):
                    from ingot.runtime.loading.loader import load_artifact
                    from ingot.serve.set_up import make_engine
            finally:
                if context is not None:
                    context.imported()
            self._loaded = load_artifact(
                path,
                num_pages=num_kv_pages,
                memory=memory,
                capture=cuda_graphs,
                keep_states=enable_prefix_caching is not False,
                phases=phases,
                early=context,
                all_ranks=True,
                processes=processes,
            )
        self._engine = make_engine(
            self._loaded,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_tokens=max_num_mixed_tokens,
            chunked_prefill=enable_chunked_prefill,
            prefix_caching=enable_prefix_caching,
            cascade=not disable_cascade_attn,
            policy=scheduling_policy,
            seed=seed,
            enable_lora=enable_lora,
            max_cpu_loras=max_cpu_loras,
        )
        self._start = {"import": before, "ready": process_age()}
        self._process_start = time.monotonic() - (process_age() or 0.0)
        self._ids = itertools.count()
        # By id of an unfinished request: outputs that `_drain` has not yielded yet. Requests of one call share a list.
        self._waiting: dict[str, list[Any]] = {}

    @property
    def timings(self) -> dict[str, float]:
        """Return the seconds of each phase of the start, by name.

        "import" is the time from the start of the process to the start of the constructor. "ready" is the time from the
        start of the process to the end of the constructor. The other phases are parts of the time between, and some
        overlap. "engine" imports torch and the engine. "context" creates the GPU context, and "cublas" the first cuBLAS
        handle, both in parallel with "engine". `ingot.runtime.loading.loader.Loaded` describes the remaining phases,
        which load the artifact.

        Each CUDA graph captured so far also has an entry. "graph 8" is for decode steps of 8 sequences. "graph 8
        shared" is for such steps with cascade attention. "graph 512/64" is for prompt steps of 512 tokens and 64
        sequences. On a mesh, "rank 1 weights" is the phase "weights" of rank 1.
        """
        found = {"import": self._start["import"], **self._loaded.phases.seconds, "ready": self._start["ready"]}
        for rank, spans in self._loaded.rank_spans.items():
            for one in spans:
                name = f"rank {rank} {one.name}"
                found[name] = (found.get(name) or 0.0) + one.end - one.begin
        captured = self._loaded.executor.captured
        found |= {f"graph {rows}": seconds for rows, seconds in captured.decode.items()}
        found |= {f"graph {rows} shared": seconds for rows, seconds in captured.shared.items()}
        found |= {f"graph {tokens}/{rows}": seconds for (tokens, rows), seconds in captured.prompts.items()}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    @property
    def timeline(self) -> Mapping[int, Sequence[Span]]:
        """Return when each phase of the start ran, by the index of the rank: 0 without a mesh.

        Times are seconds since this process started. `timings` describes the phases.
        """
        each = {0: self._loaded.phases.spans, **self._loaded.rank_spans}
        begin = self._process_start
        return {
            rank: tuple(Span(one.name, one.begin - begin, one.end - begin) for one in spans)
            for rank, spans in each.items()
        }

    def idle(self) -> bool:
        """Do one piece of background work that makes later steps faster, such as capturing a CUDA graph.

        Call it while no requests run; it takes some hundredths of a second. Returns False if there was nothing to do,
        or if requests run.
        """
        return self._engine.idle()

    def on_fault(self, call: Callable[[], None]) -> None:
        """Let another thread call `call` when a process of a mesh ends or fails. `idle`, or the next step, then raises
        RankError. Without a mesh, nothing calls it."""
        if self._loaded.leader is not None:
            self._loaded.leader.on_fault(call)

    @property
    def prefix_cache_stats(self) -> "PrefixCacheStats":
        """Return three counts of prompt tokens since the start. They are tokens that were looked up in the prefix
        cache, tokens found there, and tokens computed twice after a preemption."""
        return self._engine.prefix_cache_stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes and return True. While requests run, change nothing and return False."""
        return self._engine.reset_prefix_cache()

    def get_tokenizer(self) -> "Tokenizer | None":
        """Return the artifact's tokenizer; None if the checkpoint had none."""
        return self._loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json. Fields that the file lacks
        keep the class's defaults. Raises ArtifactError for an invalid value.
        """
        return default_sampling_params(self._loaded.artifact.folder)

    def generate(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: "UseTqdm" = False,
        priority: Sequence[int] | None = None,
        lora_request: "LoRARequests" = None,
    ) -> "list[RequestOutput]":
        """Complete every prompt and return the outputs in the prompts' order.

        A prompt is a text or {"prompt_token_ids": [...]}; `prompts` is one or a list. A dict may have a "cache_salt":
        only prompts with an equal salt share cached pages. With the scheduling policy "priority", a prompt with a lower
        `priority` number runs earlier and is preempted later. `use_tqdm` shows a progress bar; a callable such as
        `tqdm` makes it. `lora_request` is a LoRA adapter for all prompts, or one or None for each. Raises RequestError
        if one prompt cannot be served, and AdapterError for an adapter that cannot be used; then none has run. Raises
        GenerationError if every request failed. If only some did, their outputs have the finish reason "error".
        """
        from ingot.serve.failures import checked

        return list(checked(self._complete(prompts, sampling_params, use_tqdm, priority, lora_request)))

    def _complete(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: "UseTqdm" = False,
        priority: Sequence[int] | None = None,
        lora_request: "LoRARequests" = None,
    ) -> "list[RequestOutput]":
        """Do the work of `generate`, but do not raise if every request failed."""
        from ingot.serve.progress import progress

        requests = self._requests(prompts, sampling_params, priority, lora_request, stream=False)
        bar = progress(use_tqdm, len(requests), "Processed prompts")
        finished: dict[str, RequestOutput] = {}
        try:
            for out in self._queued(requests):
                if out.finished:
                    finished[out.request_id] = out
                    bar.update(1)
        finally:
            bar.close()
        return [finished[key] for key in sorted(finished, key=int)]

    def beam_search(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        params: "BeamSearchParams",
        *,
        use_tqdm: "UseTqdm" = False,
        concurrency_limit: int | None = None,
    ) -> "list[BeamSearchOutput]":
        """Return the `beam_width` likeliest continuations that a beam search finds for every prompt, in their order.

        A prompt is a text or {"prompt_token_ids": [...]}; `prompts` is one or a list. At most `concurrency_limit` of
        them are searched at once (default: all). `use_tqdm` shows a progress bar of prompts. Raises RequestError before
        anything runs if one of them cannot be served, and GenerationError if every search failed.
        """
        from ingot.serve.search_beams import search_beams

        return search_beams(self._loaded, self._engine, self._complete, prompts, params, use_tqdm, concurrency_limit)

    def stream(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora_request: "LoRARequests" = None,
    ) -> "Iterator[RequestOutput]":
        """Yield the output so far of a request whenever it grows; the last output of a request has `finished` set.

        A prompt is a text or {"prompt_token_ids": [...]}; `prompts` is one or a list. All prompts run together, so
        outputs of different requests alternate. With the scheduling policy "priority", a prompt with a lower `priority`
        number runs earlier. `lora_request` is a LoRA adapter for all prompts, or one or None for each. Closing the
        iterator aborts the unfinished requests. Raises RequestError if a prompt cannot be served, and AdapterError for
        an adapter that cannot be used. At its end, the iterator raises GenerationError if every request failed.
        """
        from ingot.serve.failures import checked

        return checked(self._queued(self._requests(prompts, sampling_params, priority, lora_request, stream=True)))

    def embed(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> "list[EmbeddingOutput]":
        """Return the embedding vector of every prompt, in the prompts' order.

        A prompt is a text or {"prompt_token_ids": [...]}; `prompts` is one or a list. `pooling_params` are one for all
        prompts or one each. With the scheduling policy "priority", a prompt with a lower `priority` number runs
        earlier. Raises RequestError if the model generates tokens, or if one prompt cannot be served; then none has
        run. Raises GenerationError if every request failed.
        """
        from ingot.serve.failures import checked
        from ingot.serve.set_up import make_pooling_requests

        if not self._pools:
            raise RequestError(
                "the model makes tokens and no vectors",
                where="LLM.embed",
                expected="an artifact whose entry 'main' has the ending 'pool'",
                hint="call generate, stream or chat for tokens",
            )
        outputs = checked(
            self._queued(make_pooling_requests(prompts, pooling_params, ids=self._ids, priority=priority))
        )
        return sorted(outputs, key=lambda one: int(one.request_id))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: "LoRARequests" = None,
    ) -> "list[RequestOutput]":
        """Return the assistant's next message in a conversation, or in each of a list of conversations.

        A conversation is a list of {"role": …, "content": …}. With `add_generation_prompt`, the prompt ends with the
        header of the assistant's turn. With `continue_final_message`, the model continues the last message; pass
        `add_generation_prompt` False then. `tools` are JSON schemas of functions. `chat_template_kwargs` are variables
        for the model's chat template. `lora_request` is as in `generate`. Raises RequestError if one conversation
        cannot be served; then none has run.
        """
        prompts = self.preprocess_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, lora_request=lora_request)

    def preprocess_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "list[Prompt]":
        """Render conversations with the model's chat template into prompts for `generate` and `stream`.

        A conversation is a list of {"role": …, "content": …}. With `add_generation_prompt`, the prompt ends with the
        header of the assistant's turn. With `continue_final_message`, the model continues the last message; pass
        `add_generation_prompt` False then. `tools` are JSON schemas of functions. `chat_template_kwargs` are variables
        for the template. The template is the artifact's; callers cannot pass another. Text of a control token in a
        message, such as `<|im_start|>`, is tokenized as plain text. Raises RequestError, or ArtifactError for an
        invalid template.
        """
        from ingot.runtime.chat.template import ChatOptions

        options = ChatOptions(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        return self._chat_template.prompts(messages, options)

    @property
    def llm_engine(self) -> "Engine | PoolingEngine":
        """Return the engine, for callers that call its `add_request`, `step` and `has_unfinished`. The property has the
        name that vLLM uses. While such requests are unfinished, call no other method of this object."""
        return self._engine

    @property
    def loaded(self) -> "Loaded":
        """Return the loaded artifact with its plans, limits, tokenizer and end tokens."""
        return self._loaded

    @cached_property
    def _chat_template(self) -> "ChatTemplate":
        if self._loaded.tokenizer is None:
            raise RequestError("a chat with a model without a tokenizer", expected="an artifact with a tokenizer")
        from ingot.runtime.chat.renderer import Renderer
        from ingot.runtime.chat.template import ChatTemplate

        return ChatTemplate(self._loaded.artifact.tokenizer, self._loaded.tokenizer, Renderer())

    def _requests(
        self,
        prompts: "PromptLike | Sequence[PromptLike]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora_request: "LoRARequests",
        *,
        stream: bool,
    ) -> "list[EngineRequest]":
        from ingot.serve.set_up import make_requests

        if self._pools:
            raise RequestError(
                "the model makes vectors and no tokens",
                where="LLM.generate",
                expected="an artifact whose entry 'main' has an ending that samples",
                hint="call embed for the vectors of prompts",
            )
        return make_requests(
            prompts,
            sampling_params,
            ids=self._ids,
            default=self.get_default_sampling_params,
            priority=priority,
            stream=stream,
            adapters=self._adapter_names(lora_request),
        )

    def _adapter_names(self, given: "LoRARequests") -> "str | list[str | None] | None":
        """Return the names of adapters, and read those that the engine does not have yet."""
        if given is None:
            return None
        from ingot.runtime.adapters.lora_request import LoRARequest
        from ingot.serve.read_adapters import read_adapters

        if isinstance(given, LoRARequest):
            return read_adapters(self._engine, [given])[0]
        return read_adapters(self._engine, given)

    @property
    def _pools(self) -> bool:
        """Return whether the model ends in pooling: it returns a vector for a prompt instead of generated tokens."""
        from ingot.runtime.engines.pooling_engine import PoolingEngine

        return isinstance(self._engine, PoolingEngine)

    def _queued(self, requests: Sequence[Any]) -> "Iterator[Any]":
        """Add requests to the engine, and return an iterator over their outputs. `requests` are EngineRequests or
        PoolingRequests."""
        self._engine.add_requests(requests)
        outputs = self._drain({request.request_id for request in requests})
        next(outputs)  # started, so that its `finally` aborts the requests even if nothing reads it
        return outputs

    def _drain(self, open_ids: set[str]) -> "Iterator[Any]":
        """Run steps until the requests with the ids `open_ids` have finished, and yield their outputs.

        Closing the iterator early aborts the requests. The first value is None: `_queued` takes it to start the
        generator before any step. A step also serves requests of other iterators. It stores their outputs in
        `self._waiting`.
        """
        waiting: list[Any] = []
        self._waiting.update(dict.fromkeys(open_ids, waiting))
        try:
            yield None
            while open_ids:
                if not waiting:
                    if not self._engine.has_unfinished():
                        raise InternalError("the requests were dropped, because a step for others failed")
                    for output in self._engine.step():
                        self._waiting[output.request_id].append(output)
                    continue
                outputs = waiting[:]
                waiting.clear()
                for output in outputs:
                    if output.finished:
                        open_ids.discard(output.request_id)
                        del self._waiting[output.request_id]
                    yield output
        finally:
            for request_id in open_ids:
                self._engine.abort(request_id)
                del self._waiting[request_id]
