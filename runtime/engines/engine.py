"""The engine for models that generate tokens: it takes prompts and returns completions."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ingot.ir.errors import RequestError
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.runtime.adapters.host_adapter import HostAdapter
from ingot.runtime.adapters.manager import AdapterManager
from ingot.runtime.adapters.waiting import WaitingForAdapters
from ingot.runtime.engines.logprobs import SequenceLogprobs, StepLogprobs
from ingot.runtime.engines.request_group import GroupSequence, Report, RequestGroup, request_output
from ingot.runtime.engines.serving_loop import ServingLoop
from ingot.runtime.engines.spare_time import Work, nothing_to_do
from ingot.runtime.grammar.compiled import Grammars
from ingot.runtime.grammar.matcher import Matcher
from ingot.runtime.params.logit_edits import LogitEdits, edits_of
from ingot.runtime.params.prompt import Prompt, PromptLike
from ingot.runtime.params.sampling_checks import MAX_SEED
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.forced import worth_looking
from ingot.runtime.scheduling.occupancy import Occupancy
from ingot.runtime.scheduling.request import INVALID_TOKEN, End, Given, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.steps.executor import SampledStep, StepLauncher
from ingot.runtime.text.detokenizer import Detokenizer
from ingot.runtime.text.stop_strings import StopStrings
from ingot.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ingot.runtime.grammar.masks import Masks


@dataclass(frozen=True)
class EngineRequest:
    """One request of `Engine.add_requests`: an id, a prompt, and sampling parameters.

    stream     return an output after each step; False: return one output at the end of all its sequences
    priority   requests with lower numbers are served first; must be 0 unless the scheduler's policy is "priority"
    report     makes what `Engine.step` returns for the request; by default a RequestOutput
    adapter    the name of a LoRA adapter that the engine's `adapters` have; None: the model alone
    """

    request_id: str
    prompt: PromptLike
    params: SamplingParams
    stream: bool = True
    priority: int = 0
    report: Report = request_output
    adapter: str | None = None


class Engine(ServingLoop[EngineRequest, RequestGroup, Any]):
    """Serves requests for generated tokens. Call `add_requests`, then `step` until `has_unfinished` returns False.

    executor        runs the steps
    scheduler       selects the tokens of each step
    tokenizer       encodes text prompts and decodes tokens; None: prompts must be token ids
    vocab_size      size of the model's vocabulary; token ids of prompts must be below it
    eos_token_ids   the model's end tokens; None: the tokenizer's
    seed            seeds the generator that draws a seed for each request without one, as in vLLM's `LLM(seed=0)`
    work            does work for later steps while the host is idle; its argument is how many seconds it may take
    pin_memory      whether the masks of grammars are copied to a GPU
    grammars        (attribute) the compiled grammars of requests
    adapters        the LoRA adapters that requests can use; None: the artifact was compiled for none
    """

    def __init__(
        self,
        executor: StepLauncher,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] | None = None,
        seed: int = 0,
        work: Work = nothing_to_do,
        pin_memory: bool = False,
        adapters: AdapterManager | None = None,
    ) -> None:
        super().__init__(executor, scheduler, tokenizer, vocab_size=vocab_size, work=work)
        self.adapters = adapters
        self._for_adapters: WaitingForAdapters[RequestGroup] | None = None
        if adapters is not None:
            self._for_adapters = WaitingForAdapters(adapters)
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        # Some configs name an end token outside the vocabulary: no model samples it, and min_tokens cannot ban it.
        self._eos_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._random = random.Random(seed)
        self.grammars = Grammars(tokenizer, vocab_size, self._eos_ids)
        self._pin_memory = pin_memory
        self._masks: Masks | None = None  # until the first step with a grammar

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's end tokens that its vocabulary contains."""
        return self._eos_ids

    def add_request(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | None = None, *, stream: bool = True
    ) -> None:
        """Queue one request. If `params` is None, use the default sampling parameters.

        stream   each later `step` returns an output of the request; False: only the step that ends it returns one

        Raises RequestError for a bad request; then nothing is queued.
        """
        self.add_requests([EngineRequest(request_id, prompt, params or SamplingParams(), stream)])

    def _queue(self, group: RequestGroup) -> None:
        for index, sequence in enumerate(group.sequences):
            seed = group.params.seed
            sequence.request.seed = self._random.getrandbits(63) if seed is None else (seed + index) & MAX_SEED
            self._by_request[sequence.request] = group, sequence
        if group.adapter is None or self._for_adapters is None:
            self._schedule(group)
        else:
            self._for_adapters.add(group, group.adapter)

    def _schedule(self, group: RequestGroup) -> None:
        for index, sequence in enumerate(group.sequences):
            self._scheduler.add(sequence.request, group.sequences[0].request if index else None)

    def _admit(self) -> None:
        if not self._for_adapters or self.adapters is None:
            return
        for group, adapter in self._for_adapters.ready():
            slot = self.adapters.use(adapter)
            for request in group.requests:
                request.adapter_slot = slot
            self._schedule(group)

    @property
    def occupancy(self) -> Occupancy:
        """The counts of the scheduler. Sequences that wait for an adapter count as waiting."""
        found = super().occupancy
        held = () if self._for_adapters is None else self._for_adapters.requests
        return replace(found, waiting=found.waiting + sum(len(group.requests) for group in held)) if held else found

    @property
    def waiting_adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests wait for."""
        return () if self._for_adapters is None else self._for_adapters.names

    @property
    def _holds_back(self) -> bool:
        return bool(self._for_adapters)

    def _forget(self, group: RequestGroup) -> None:
        super()._forget(group)
        self._release(group)

    def _release(self, group: RequestGroup) -> None:
        """End a group's use of its adapter."""
        if group.adapter is None or self._for_adapters is None or self.adapters is None:
            return
        if self._for_adapters.drop(group):  # the scheduler does not have its sequences yet
            for request in group.requests:
                request.stop(End("abort"))
        else:
            self.adapters.release(group.adapter)

    def _reset(self) -> None:
        groups = list(self._groups.values())
        super()._reset()
        for group in groups:
            self._release(group)

    def _adapter(self, name: str | None) -> HostAdapter | None:
        """Return the adapter of a request. Raises AdapterError for an unknown name, RequestError if there are none."""
        if name is None:
            return None
        if self.adapters is None:
            raise RequestError(
                f"the adapter '{name:.80}' for an artifact without adapters",
                expected="no adapter",
                hint="compile with --max-loras",
            )
        return self.adapters.find(name)

    def _group(self, given: EngineRequest, prompt: Prompt) -> RequestGroup:
        params = given.params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters of type {type(params).__name__}", expected="SamplingParams")
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise RequestError(
                    f"stop token id {token} is out of range",
                    where="SamplingParams.stop_token_ids",
                    expected=f"an integer in [0, {self._vocab_size - 1}]",
                )
        prompt = _truncated(prompt, params, self._scheduler.config.max_seq_len)
        tokenizer = self._tokenizer if params.detokenize else None
        if params.stop and tokenizer is None:
            raise RequestError(
                "stop strings for a model without a tokenizer", where="SamplingParams.stop", expected="stop_token_ids"
            )
        stops = StopStrings(params.stop) if params.stop else None
        sequences: list[GroupSequence] = []
        prompt_ids = list(prompt.token_ids)  # a copy: callers get the other list
        cache_salt = (prompt.cache_salt or "").encode("utf-8", "surrogatepass")
        edits: LogitEdits | None = None
        adapter = self._adapter(given.adapter)
        for index in range(params.n):
            request = Request(
                Given(
                    self._own_id(given.request_id, index),
                    prompt_ids,
                    params,
                    eos_ids=self._eos_ids,
                    scores_prompt=index == 0 and params.prompt_logprobs is not None,  # the others have the same prompt
                    cache_salt=cache_salt,
                    adapter_key=b"" if adapter is None else adapter.key,
                    priority=given.priority,
                    streamed=given.stream,
                )
            )
            if index == 0:
                self._check(request)
                edits = self._edits(request)
            request.edits = edits
            if params.structured_outputs is not None:
                backend = self.grammars.matcher(params.structured_outputs)
                request.matcher = Matcher(backend, self._eos_ids, goes_on=params.ignore_eos)
            if tokenizer is not None:
                request.text = Detokenizer(tokenizer, params, prompt_ids, stops)
            sequences.append(GroupSequence(request, None if params.logprobs is None else SequenceLogprobs(tokenizer)))
        prompt_logprobs = None if params.prompt_logprobs is None else SequenceLogprobs(tokenizer, [None])
        collected = sequences, prompt_logprobs
        return RequestGroup(given.request_id, prompt, params, given.stream, *collected, given.report, adapter)

    def _check(self, request: Request) -> None:
        """Raise RequestError if the engine can never serve the request, for example because it is too long."""
        self._scheduler.check(request)
        if request.params.min_tokens and len(ends := request.end_tokens()) > MAX_BANNED:
            raise RequestError(
                f"min_tokens bans {len(ends)} end tokens",
                where="SamplingParams.min_tokens",
                expected=f"at most {MAX_BANNED}, the model's own and stop_token_ids together",
            )

    def _edits(self, request: Request) -> LogitEdits | None:
        """Return the logit edits of a request; None if it has none. Raises RequestError for invalid ones."""
        params = request.params
        assert isinstance(params, SamplingParams)
        edits = edits_of(params, self._vocab_size, self._tokenizer)
        if edits is not None and params.min_tokens and edits.allows_only(request.end_tokens()):
            raise RequestError(
                "allowed_token_ids and bad_words leave only end tokens, which min_tokens bans",
                where="SamplingParams.min_tokens",
                expected="0, or another token that may be chosen",
            )
        return edits

    def _prepare_ending(self, batch: StepBatch) -> list[Any]:
        outputs = super()._prepare_ending(batch)
        if batch.inputs.masked:
            if self._masks is None:
                from ingot.runtime.grammar.masks import Masks

                rows, grammars = self._scheduler.config.max_batch, self.grammars
                sizes = self._vocab_size, grammars.words, rows
                self._masks = Masks(*sizes, grammars.surplus, pin_memory=self._pin_memory)
            batch.inputs.masks, ended = self._masks.fill(batch.inputs.masked)
            for request, end in ended:
                outputs += self._end_alone(request, end)
        return outputs

    def _look_ahead(self, batch: StepBatch) -> None:
        config = self._scheduler.config
        if self._masks is None or not (batch.inputs.masked and config.feeds_forced):
            return
        if worth_looking(batch.inputs.sizes.B):
            self._scheduler.look_again_at(self._masks.look_ahead(batch.inputs.masked, config.max_forced))

    def _read(self, handle: SampledStep) -> list[int]:
        return handle.tokens()

    def _retire(self, batch: StepBatch, handle: SampledStep, read: list[int]) -> list[Any]:
        logprobs = handle.logprobs() if batch.returns_logprobs else None
        if logprobs is not None:
            self._add_prompt_logprobs(batch, logprobs)
        changed: dict[str, RequestGroup] = {}
        rejected = None if batch.rows is None else handle.rejected()
        for request, token, row in self._scheduler.retire(batch, read, rejected):
            if request.given.streamed or request.end is not None:
                group, sequence = self._by_request[request]
                changed[group.request_id] = group
            elif logprobs is None:
                continue  # its caller waits for the last token
            else:
                _, sequence = self._by_request[request]
            if logprobs is not None and sequence.logprobs is not None and token != INVALID_TOKEN:
                sequence.logprobs.add(logprobs, row)
        outputs: list[Any] = []
        for group in changed.values():
            finished = group.finished
            if finished or group.stream:
                outputs.append(group.output(finished))
            if finished:
                self._forget(group)
        return outputs

    def _add_prompt_logprobs(self, batch: StepBatch, logprobs: StepLogprobs) -> None:
        """Store the prompt_logprobs that a step has computed, in the outputs of their requests. Requests that have
        ended since the launch get none."""
        row = batch.num_sampled_rows
        for request, count in batch.scored:
            group, _ = self._by_request.get(request, (None, None))
            if group is not None and group.prompt_logprobs is not None:
                for index in range(row, row + count):
                    group.prompt_logprobs.add(logprobs, index)
            row += count


def _truncated(prompt: Prompt, params: SamplingParams, max_seq_len: int) -> Prompt:
    """Return the prompt with only its last tokens, if `params.truncate_prompt_tokens` limits their number."""
    kept = params.truncate_prompt_tokens
    if kept is None:
        return prompt
    return replace(prompt, token_ids=prompt.token_ids[-(max(1, max_seq_len - 1) if kept < 0 else kept) :])
