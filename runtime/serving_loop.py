"""The serving loop of every kind of model: requests are queued, steps are launched, one is in flight."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from ingot.ir.errors import InternalError, RequestError, StepMemoryError
from ingot.runtime.batch import StepBatch
from ingot.runtime.executor import SampledStep, StepLauncher
from ingot.runtime.occupancy import Occupancy
from ingot.runtime.prefix_cache import PrefixCacheStats
from ingot.runtime.prompt import Prompt, PromptLike, read_prompts
from ingot.runtime.request import End, Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.spare_time import SpareTime, Work, nothing_to_do
from ingot.runtime.tokenizer import Tokenizer


class Asked(Protocol):
    """A caller's request, as far as every loop knows it."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt(self) -> PromptLike: ...


class Group(Protocol):
    """A caller's request while it is served: its sequences, reported together. `stream` False: an output is given only
    when all of them have ended."""

    @property
    def request_id(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def finished(self) -> bool: ...

    def output(self, finished: bool) -> Any: ...


_Given = TypeVar("_Given", bound=Asked)
Served = TypeVar("Served", bound=Group)
Out = TypeVar("Out")


class ServingLoop(ABC, Generic[_Given, Served, Out]):
    """Serves requests with an executor and a scheduler; what becomes of a step is said by the kind of model.

    vocab_size   of the model: prompt token ids are below it
    work         what makes later steps quicker, done while the host only waits: it gets the seconds that there are

    Not thread-safe: one thread adds, steps and aborts.
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
        self._launched: tuple[StepBatch, SampledStep] | None = None
        self._serial = 0

    @abstractmethod
    def _group(self, given: _Given, prompt: Prompt) -> Served:
        """Check everything else about a request, and queue nothing. Raises RequestError."""

    @abstractmethod
    def _queue(self, group: Served) -> None:
        """Give the sequences of a group that was checked to the scheduler."""

    @abstractmethod
    def _read(self, handle: SampledStep) -> Any:
        """What the host takes of a step; waits for it."""

    @abstractmethod
    def _retire(self, batch: StepBatch, handle: SampledStep, read: Any) -> list[Out]:
        """What a step gave to the requests. Returns those that changed."""

    def add_requests(self, requests: Sequence[_Given]) -> None:
        """Queue requests, all or none. Raises RequestError for a bad one; then nothing has changed."""
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
        """The id of a sequence: the serial number keeps it apart whatever callers choose; the rest is for people who
        read messages."""
        self._serial += 1
        return f"{request_id}[{index}]#{self._serial}"

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
        """Do a piece of what makes later steps quicker, which takes some hundredths of a second; for callers that
        wait for requests. False when nothing is left to do, or requests are there to be served.
        """
        return not self.has_unfinished() and self._work(math.inf)

    def step(self) -> list[Out]:
        """Launch the next step, then take what the one before gave. Returns the requests that changed.

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

    def abort(self, request_id: str) -> Out | None:
        """End a request now; its pages are free once the step in flight has retired.

        Returns its last output, unfinished sequences as "abort"; None when there is no such request.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            self._scheduler.abort(request.request_id)
        self._forget(group)
        last: Out = group.output(finished=True)
        return last

    def launch_through(self, executor: StepLauncher) -> None:
        """Give all later steps to `executor`, which is to pass them on to the one that the engine was made with."""
        self._executor = executor

    def _waited(self, launched: tuple[StepBatch, SampledStep] | None) -> list[Out]:
        """Take what a step gives, and use the time until it is there."""
        if launched is None:
            self._spare.begin()
            return []
        batch, handle = launched
        self._spare.wait(batch.inputs.sizes.T)
        read = self._read(handle)
        self._spare.end(batch.inputs.sizes.T)
        return self._retire(batch, handle, read)

    def _end_alone(self, request: Request | None, reason: str) -> list[Out]:
        """End a sequence that a step has no memory for though it has no other; None where there is something to try."""
        if request is None or request.finished:
            return []
        group, _ = self._by_request[request]
        self._scheduler.finish(request, End("error", reason))
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
        self._launched = None
        self._groups.clear()
        self._by_request.clear()
