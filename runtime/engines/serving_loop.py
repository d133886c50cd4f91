"""The serving loop that all engines share: queue requests, launch steps, and keep steps in flight."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from ingot.ir.errors import InternalError, RequestError, StepMemoryError
from ingot.runtime.engines.spare_time import SpareTime, Work, nothing_to_do
from ingot.runtime.pages.prefix_cache import PrefixCacheStats
from ingot.runtime.params.prompt import Prompt, PromptLike, read_prompts
from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.occupancy import Occupancy
from ingot.runtime.scheduling.request import End, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.steps.executor import SampledStep, StepLauncher
from ingot.runtime.text.tokenizer import Tokenizer

# How long a step waits if all requests wait for an adapter. Copying one of 84 MB to a GPU takes some 2 ms.
_HELD_SECONDS = 0.0005


class CallerRequest(Protocol):
    """The fields of a caller's request that the serving loop reads. EngineRequest and PoolingRequest have them."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt(self) -> PromptLike: ...


class CallerGroup(Protocol):
    """A caller's request while it is served, with its n sequences. Each output reports all of them.

    request_id   the id of the caller's request
    stream       return an output after each step; False: return one output at the end of all sequences
    requests     the sequences
    finished     whether all sequences have ended
    output       returns the output so far; its argument says whether it is the last one
    """

    @property
    def request_id(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def finished(self) -> bool: ...

    def output(self, finished: bool) -> Any: ...


_Given = TypeVar("_Given", bound=CallerRequest)
Served = TypeVar("Served", bound=CallerGroup)
Out = TypeVar("Out")


class ServingLoop(ABC, Generic[_Given, Served, Out]):
    """The loop of an engine: it serves requests with an executor and a scheduler. Subclasses turn the results of a step
    into outputs. Not thread-safe: one thread must make all calls.

    executor     runs the steps
    scheduler    selects the tokens of each step
    tokenizer    encodes text prompts; None: prompts must be token ids
    vocab_size   size of the model's vocabulary; token ids of prompts must be below it
    work         does work for later steps while the host is idle; its argument is how many seconds it may take
    """

    def __init__(
        self,
        executor: StepLauncher,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int,
        work: Work = nothing_to_do,
    ) -> None:
        self._executor = executor
        self._work = work
        self._spare = SpareTime(work)
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._groups: dict[str, Served] = {}  # not finished, by the caller's id
        self._by_request: dict[Request, tuple[Served, Any]] = {}  # of the groups above
        self._launched: deque[tuple[StepBatch, SampledStep]] = deque()  # the oldest step first
        self._serial = 0

    @abstractmethod
    def _group(self, given: _Given, prompt: Prompt) -> Served:
        """Return the group of sequences for a caller's request, without queueing it. `prompt` is checked already.
        Raises RequestError if another part of the request is invalid."""

    @abstractmethod
    def _queue(self, group: Served) -> None:
        """Add the sequences of a group, which `_group` returned, to the scheduler."""

    @abstractmethod
    def _read(self, handle: SampledStep) -> Any:
        """Wait for a launched step and return its results on the host. `_retire` gets them as `read`."""

    @abstractmethod
    def _retire(self, batch: StepBatch, handle: SampledStep, read: Any) -> list[Out]:
        """Apply the results of a step to its requests, and return the outputs for callers.

        batch    the step
        handle   the handle of the launched step; it has results that `_read` did not return, such as log-probabilities
        read     what `_read` returned
        """

    def _prepare_ending(self, batch: StepBatch) -> list[Out]:
        """Fill what the ending of a launched step waits for, after the step before is complete. Return the outputs of
        requests that end by this."""
        batch.inputs.fill_late()
        return []

    def _look_ahead(self, batch: StepBatch) -> None:
        """Do what later steps can use, after the ending of a step was launched that `_prepare_ending` has prepared."""

    def _admit(self) -> None:
        """Add requests to the scheduler that waited for something besides their turn. Called before each step."""

    @property
    def _holds_back(self) -> bool:
        """Whether requests wait for something besides their turn, so that the scheduler does not have them yet."""
        return False

    def add_requests(self, requests: Sequence[_Given]) -> None:
        """Queue all of these requests. If one of them is invalid, raise RequestError and queue none."""
        groups: dict[str, Served] = {}
        prompts = read_prompts([request.prompt for request in requests], self._tokenizer, self._vocab_size)
        for request, prompt in zip(requests, prompts, strict=True):
            if request.request_id in groups or request.request_id in self._groups:
                raise RequestError(f"request id '{request.request_id}' is in use", expected="an id of its own")
            groups[request.request_id] = self._group(request, prompt)
        for group in groups.values():
            self._groups[group.request_id] = group
            self._queue(group)

    def _own_id(self, request_id: str, index: int) -> str:
        """Return a unique id for sequence `index` of a caller's request. A serial number makes it unique. The other
        parts help readers of messages."""
        self._serial += 1
        return f"{request_id}[{index}]#{self._serial}"

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return self._scheduler.config.max_seq_len

    @property
    def occupancy(self) -> Occupancy:
        return self._scheduler.occupancy

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return self._scheduler.prefix_cache_stats

    @property
    def steps_ended(self) -> int:
        """Return the number of steps that have ended."""
        return self._spare.steps

    @property
    def seconds_waited(self) -> float:
        """Return the seconds that this thread has waited for the ends of steps. If they are few of the seconds in which
        steps run, the host limits the speed."""
        return self._spare.waited

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache and return True. While requests run, change nothing and return False."""
        while not self._groups and self._launched:
            self.step()  # retire a step in flight, which has only surplus tokens of stopped requests
        return self._scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """Return whether a request is running or waiting, or a step is in flight."""
        return bool(self._groups) or bool(self._launched)

    def idle(self) -> bool:
        """Do one piece of work for later steps, such as the capture of a CUDA graph. It takes some hundredths of a
        second. Call it while no requests arrive.

        Return False if no work is left, or if there are requests to serve.
        """
        return not self.has_unfinished() and self._work(math.inf)

    def step(self) -> list[Out]:
        """Launch the next step, then wait for the step launched before, and return the outputs that it has changed.

        The first call after a pause only launches a step, and returns an empty list. With pipeline stages, so do the
        next calls, until each stage has a step; each later call launches one more, and then waits for the oldest step
        in flight. If the device has no memory for a step, the step is undone and a smaller one is tried. A sequence
        that does not fit alone ends with reason "error". Other errors of the executor end all requests and propagate.
        The engine stays usable.
        """
        try:
            self._admit()
            batch = self._scheduler.schedule()
            if batch is None and not self._launched and self._groups:
                if self._holds_back:
                    time.sleep(_HELD_SECONDS)
                    return []
                raise InternalError("requests wait, and no step can be scheduled", where="Engine.step")
            outputs: list[Out] = []
            too_large, first = None, not self._launched
            if batch is not None:
                if self._scheduler.config.stages > 1 and batch.inputs.ends_late:  # the host has all tokens it needs
                    outputs += self._prepare_ending(batch)
                    batch.inputs.prepared = True
                try:
                    self._launched.append((batch, self._executor.launch(batch.inputs)))
                except StepMemoryError as error:
                    too_large = self._scheduler.withdraw(batch), error.what
                    batch = None
            if first:
                self._spare.begin()
            if batch is None or len(self._launched) == self._scheduler.config.most_in_flight:
                outputs += self._waited(batch)
            if batch is not None and batch.inputs.ends_late:
                outputs += self._prepare_ending(batch)
                self._launched[-1][1].finish()
                self._look_ahead(batch)
            return outputs if too_large is None else outputs + self._end_large(*too_large)
        except BaseException:  # KeyboardInterrupt too: the loop cannot resume half a step
            self._reset()
            raise

    def abort(self, request_id: str) -> Out | None:
        """End a request now, and return its last output; None for an unknown id. Sequences that had not finished have
        finish_reason "abort". The request's pages become free when the step in flight is complete."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            self._scheduler.abort(request.request_id)
        self._forget(group)
        last: Out = group.output(finished=True)
        return last

    def launch_through(self, executor: StepLauncher) -> None:
        """Use `executor` for all later steps. It wraps the executor of the constructor, for example to record steps."""
        self._executor = executor

    def _waited(self, newest: StepBatch | None) -> list[Out]:
        """Wait for the oldest step in flight, if there is one, and return its outputs. While waiting, do work for later
        steps. `newest` is the step that was launched just now; None: none was."""
        if not self._launched:
            return []
        batch, handle = self._launched.popleft()
        # Other work would run between the forward pass and the ending of a step that waits for late inputs.
        if newest is None or not newest.inputs.ends_late:
            self._spare.wait(batch.inputs.sizes.T)
        read = self._read(handle)
        self._spare.end(batch.inputs.sizes.T)
        return self._retire(batch, handle, read)

    def _end_large(self, request: Request | None, reason: str) -> list[Out]:
        """End a sequence that does not fit into the device's memory even alone in a step, and return its outputs.
        `reason` is the text of the memory error. If `request` is None, do nothing and return an empty list."""
        return [] if request is None or request.finished else self._end_alone(request, End("error", reason))

    def _end_alone(self, request: Request, end: End) -> list[Out]:
        """End one sequence for the reason `end`, and return its outputs."""
        group, _ = self._by_request[request]
        self._scheduler.finish(request, end)
        finished = group.finished
        if finished:
            self._forget(group)
        return [group.output(finished)] if group.stream or finished else []

    def _forget(self, group: Served) -> None:
        del self._groups[group.request_id]
        for request in group.requests:
            del self._by_request[request]

    def _reset(self) -> None:
        self._scheduler.reset()
        self._launched.clear()
        self._groups.clear()
        self._by_request.clear()
