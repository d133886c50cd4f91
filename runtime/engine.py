"""The serving loop: requests in, outputs out, one step in flight."""

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.ir.errors import InternalError, RequestError, StepMemoryError
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.runtime.batch import StepBatch
from ingot.runtime.detokenizer import Detokenizer
from ingot.runtime.executor import SampledStep, StepLauncher
from ingot.runtime.growing import SoFar
from ingot.runtime.logprobs import SequenceLogprobs, StepLogprobs
from ingot.runtime.occupancy import Occupancy
from ingot.runtime.outputs import CompletionOutput, RequestOutput
from ingot.runtime.prefix_cache import PrefixCacheStats
from ingot.runtime.prompt import Prompt, PromptLike, read_prompts
from ingot.runtime.request import INVALID_TOKEN, End, Given, Request
from ingot.runtime.sampling_params import MAX_SEED, SamplingParams
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.spare_time import SpareTime, Work, nothing_to_do
from ingot.runtime.stop_strings import StopStrings
from ingot.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineRequest:
    """What `Engine.add_requests` takes: an id, a prompt, and how to sample.

    stream     False: the engine gives an output only when all sequences have ended
    priority   the lower, the sooner it is served; other than 0 only where the scheduler's policy is "priority"
    """

    request_id: str
    prompt: PromptLike
    params: SamplingParams
    stream: bool = True
    priority: int = 0


_Told = Callable[[list[Any]], Sequence[Any]]  # how a list that grows is told of


@dataclass(frozen=True)
class _Sequence:
    """One of the n sequences of a request."""

    request: Request
    logprobs: SequenceLogprobs | None

    def output(self, index: int, told: "_Told") -> CompletionOutput:
        request, logprobs = self.request, self.logprobs
        reason, stop = (None, None) if request.end is None else request.end
        return CompletionOutput(
            index,
            "" if request.text is None else request.text.text,
            told(request.output_ids),
            None if logprobs is None else logprobs.cumulative,
            None if logprobs is None else told(logprobs.entries),
            reason,
            stop,
        )


@dataclass(frozen=True)
class _Group:
    """A caller's request: its n sequences, reported together."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    stream: bool
    sequences: list[_Sequence]
    prompt_logprobs: SequenceLogprobs | None

    @property
    def finished(self) -> bool:
        return None not in [sequence.request.end for sequence in self.sequences]

    def output(self, finished: bool) -> RequestOutput:
        # Most outputs are only to say what has come since the one before: all else is not copied for them.
        told: _Told = list if finished else SoFar
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            [sequence.output(index, told) for index, sequence in enumerate(self.sequences)],
            finished,
            None if self.prompt_logprobs is None else told(self.prompt_logprobs.entries),
            self.sequences[0].request.cached.num_found,
        )


class Engine:
    """Serves requests with an executor and a scheduler.

    vocab_size      of the model: prompt token ids are below it
    eos_token_ids   the model's end tokens; None: the tokenizer's
    seed            of the generator that seeds requests without a seed of their own, as in vLLM's `LLM(seed=0)`
    work            what makes later steps quicker, done while the host only waits: it gets the seconds that there are

    Not thread-safe: one thread adds, steps and aborts.
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
    ) -> None:
        self._executor = executor
        self._work = work
        self._spare = SpareTime(work)
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        # Some configs name one that the model does not have: it never comes, and cannot be held back.
        self._eos_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._random = random.Random(seed)
        self._groups: dict[str, _Group] = {}  # not finished, by the caller's id
        self._by_request: dict[Request, tuple[_Group, _Sequence]] = {}  # of the groups above
        self._launched: tuple[StepBatch, SampledStep] | None = None
        self._serial = 0

    def add_request(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | None = None, *, stream: bool = True
    ) -> None:
        """Queue one request. Raises RequestError; then nothing has changed."""
        self.add_requests([EngineRequest(request_id, prompt, params or SamplingParams(), stream)])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, all or none. Raises RequestError for a bad one; then nothing has changed."""
        groups: dict[str, _Group] = {}
        prompts = read_prompts([request.prompt for request in requests], self._tokenizer, self._vocab_size)
        for request, prompt in zip(requests, prompts, strict=True):
            if request.request_id in groups or request.request_id in self._groups:
                raise RequestError(f"request id '{request.request_id}' is in use", expected="an id of its own")
            groups[request.request_id] = self._group(request, prompt)
        for group in groups.values():
            self._groups[group.request_id] = group
            for index, sequence in enumerate(group.sequences):
                seed = group.params.seed
                sequence.request.seed = self._random.getrandbits(63) if seed is None else (seed + index) & MAX_SEED
                self._by_request[sequence.request] = group, sequence
                self._scheduler.add(sequence.request, group.sequences[0].request if index else None)

    @property
    def occupancy(self) -> Occupancy:
        return self._scheduler.occupancy

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return self._scheduler.prefix_cache_stats

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while requests run."""
        if not self._groups and self._launched is not None:
            self.step()  # the surplus token of one that has stopped is in flight, and is dropped
        return self._scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """True while a request runs or waits, or a step is in flight."""
        return bool(self._groups) or self._launched is not None

    def idle(self) -> bool:
        """Do a piece of what makes later steps quicker, which takes some hundredths of a second; for whoever waits for
        requests. False when nothing is left to do, or requests are there to be served.
        """
        return not self.has_unfinished() and self._work(math.inf)

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then take the tokens of the one before. Returns the requests that changed.

        The first call after a pause launches only, and returns none. A step that the device has no memory for is taken
        back and made smaller; a sequence that does not fit alone ends as "error". When the executor fails otherwise,
        all requests end, what they held is free again, and the error goes on; the engine can be used afterwards.
        """
        try:
            batch = self._scheduler.schedule()
            if batch is None and self._launched is None and self._groups:
                raise InternalError("requests wait, and no step can be scheduled", where="Engine.step")
            before, self._launched, too_large = self._launched, None, None
            if batch is not None:
                try:
                    self._launched = batch, self._executor.launch(batch.inputs)
                except StepMemoryError as error:
                    too_large = self._scheduler.withdraw(batch), error.what
            outputs = self._waited(before)
            if self._launched is not None and self._launched[0].inputs.layout.late:
                self._launched[0].inputs.fill_late()
                self._launched[1].finish()
            return outputs if too_large is None else outputs + self._end_alone(*too_large)
        except BaseException:  # KeyboardInterrupt too: half a step cannot be gone on with
            self._reset()
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free once the step in flight has retired.

        Returns its last output, unfinished sequences as "abort"; None when there is no such request.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in group.sequences:
            self._scheduler.abort(sequence.request.request_id)
        self._forget(group)
        return group.output(finished=True)

    def launch_through(self, executor: StepLauncher) -> None:
        """Give all later steps to `executor`, which is to pass them on to the one that the engine was made with."""
        self._executor = executor

    def _group(self, given: EngineRequest, prompt: Prompt) -> _Group:
        """Check everything else about a request, and queue nothing."""
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
        tokenizer = self._tokenizer if params.detokenize else None
        if params.stop and tokenizer is None:
            raise RequestError(
                "stop strings for a model without a tokenizer", where="SamplingParams.stop", expected="stop_token_ids"
            )
        stops = StopStrings(params.stop) if params.stop else None
        sequences: list[_Sequence] = []
        prompt_ids = list(prompt.token_ids)  # apart from the list that callers get
        cache_salt = (prompt.cache_salt or "").encode("utf-8", "surrogatepass")
        for index in range(params.n):
            # The serial number keeps ids apart whatever callers choose; the rest is for people who read messages.
            self._serial += 1
            request = Request(
                Given(
                    f"{given.request_id}[{index}]#{self._serial}",
                    prompt_ids,
                    params,
                    eos_ids=self._eos_ids,
                    scores_prompt=index == 0 and params.prompt_logprobs is not None,  # the others have the same prompt
                    cache_salt=cache_salt,
                    priority=given.priority,
                    streamed=given.stream,
                )
            )
            if index == 0:
                self._check(request)
            if tokenizer is not None:
                request.text = Detokenizer(tokenizer, params, prompt_ids, stops)
            sequences.append(_Sequence(request, None if params.logprobs is None else SequenceLogprobs(tokenizer)))
        prompt_logprobs = None if params.prompt_logprobs is None else SequenceLogprobs(tokenizer, [None])
        return _Group(given.request_id, prompt, params, given.stream, sequences, prompt_logprobs)

    def _check(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served."""
        self._scheduler.check(request)
        if request.params.min_tokens and len(ends := request.end_tokens()) > MAX_BANNED:
            raise RequestError(
                f"{len(ends)} end tokens are to be held back until min_tokens",
                where="SamplingParams.min_tokens",
                expected=f"at most {MAX_BANNED}, the model's own and stop_token_ids together",
            )

    def _waited(self, launched: tuple[StepBatch, SampledStep] | None) -> list[RequestOutput]:
        """Take the tokens of a step, and use the time until they are there."""
        if launched is None:
            self._spare.begin()
            return []
        batch, handle = launched
        self._spare.wait(batch.inputs.sizes.T)
        tokens = handle.tokens()
        self._spare.end(batch.inputs.sizes.T)
        return self._retire(batch, handle, tokens)

    def _retire(self, batch: StepBatch, handle: SampledStep, tokens: list[int]) -> list[RequestOutput]:
        logprobs = handle.logprobs() if batch.gives_logprobs else None
        if logprobs is not None:
            self._rate_prompts(batch, logprobs)
        changed: dict[str, _Group] = {}
        rejected = None if batch.rows is None else handle.rejected()
        for request, token, row in self._scheduler.retire(batch, tokens, rejected):
            group, sequence = self._by_request[request]
            if logprobs is not None and sequence.logprobs is not None and token != INVALID_TOKEN:
                sequence.logprobs.add(logprobs, row)
            if group.stream or request.end is not None:
                changed[group.request_id] = group
        outputs: list[RequestOutput] = []
        for group in changed.values():
            finished = group.finished
            if finished or group.stream:
                outputs.append(group.output(finished))
            if finished:
                self._forget(group)
        return outputs

    def _end_alone(self, request: Request | None, reason: str) -> list[RequestOutput]:
        """End a sequence that a step has no memory for though it has no other; None where there is something to try."""
        if request is None or request.finished:
            return []
        group, _ = self._by_request[request]
        self._scheduler.finish(request, End("error", reason))
        finished = group.finished
        if finished:
            self._forget(group)
        return [group.output(finished)] if group.stream or finished else []

    def _rate_prompts(self, batch: StepBatch, logprobs: StepLogprobs) -> None:
        """Take the log-probabilities of prompts; those of a request that has ended meanwhile are dropped."""
        row = batch.num_sampled_rows
        for request, count in batch.scored:
            group, _ = self._by_request.get(request, (None, None))
            if group is not None and group.prompt_logprobs is not None:
                for index in range(row, row + count):
                    group.prompt_logprobs.add(logprobs, index)
            row += count

    def _forget(self, group: _Group) -> None:
        del self._groups[group.request_id]
        for sequence in group.sequences:
            del self._by_request[sequence.request]

    def _reset(self) -> None:
        self._scheduler.reset()
        self._launched = None
        self._groups.clear()
        self._by_request.clear()
