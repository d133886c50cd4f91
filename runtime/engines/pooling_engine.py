"""The engine for models that pool: it takes prompts and returns one vector per prompt."""

from dataclasses import dataclass, field, replace

import torch

from ingot.ir.errors import RequestError
from ingot.runtime.engines.outputs import EmbeddingOutput
from ingot.runtime.engines.serving_loop import ServingLoop
from ingot.runtime.engines.spare_time import Work, nothing_to_do
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt, PromptLike
from ingot.runtime.scheduling.batch import StepBatch
from ingot.runtime.scheduling.request import Given, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.steps.executor import SampledStep, StepLauncher
from ingot.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PoolingRequest:
    """One request of `PoolingEngine.add_requests`: an id, a prompt, and options of its embedding vector.

    priority   requests with lower numbers are served first; must be 0 unless the scheduler's policy is "priority"
    """

    request_id: str
    prompt: PromptLike
    params: PoolingParams = field(default_factory=PoolingParams)
    priority: int = 0


@dataclass
class _Group:
    """A caller's request while it is served. `request` is its one sequence. `vector` is its embedding vector, empty
    until it is computed."""

    request_id: str
    prompt: Prompt
    params: PoolingParams
    request: Request
    vector: list[float] = field(default_factory=list)
    stream: bool = False

    @property
    def requests(self) -> tuple[Request]:
        return (self.request,)

    @property
    def finished(self) -> bool:
        return self.request.end is not None

    def output(self, finished: bool) -> EmbeddingOutput:
        reason, stop = (None, None) if self.request.end is None else self.request.end
        found, ids = self.request.cached.num_found, self.prompt.token_ids
        return EmbeddingOutput(self.request_id, self.prompt.text, ids, self.vector, finished, reason, stop, found)


class PoolingEngine(ServingLoop[PoolingRequest, _Group, EmbeddingOutput]):
    """Serves requests for embedding vectors. Call `add_requests`, then `step` until `has_unfinished` returns False.

    executor     runs the steps
    scheduler    selects the tokens of each step
    tokenizer    encodes text prompts; None: prompts must be token ids
    vocab_size   size of the model's vocabulary; token ids of prompts must be below it
    width        number of elements of the model's vectors
    unit         whether to normalize a vector to length 1 if its request does not say
    classes      whether a vector has the logits of classes, one for each element, and is no embedding vector
    work         does work for later steps while the host is idle; its argument is how many seconds it may take
    """

    def __init__(
        self,
        executor: StepLauncher,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int,
        width: int,
        unit: bool = False,
        classes: bool = False,
        work: Work = nothing_to_do,
    ) -> None:
        super().__init__(executor, scheduler, tokenizer, vocab_size=vocab_size, work=work)
        self.width, self.unit, self.classes = width, unit, classes

    def add_request(self, request_id: str, prompt: PromptLike, params: PoolingParams | None = None) -> None:
        """Queue one request. If `params` is None, use the default options. Raises RequestError for a bad request; then
        nothing is queued."""
        self.add_requests([PoolingRequest(request_id, prompt, params or PoolingParams())])

    def _group(self, given: PoolingRequest, prompt: Prompt) -> _Group:
        params = given.params
        if not isinstance(params, PoolingParams):
            raise RequestError(f"pooling parameters of type {type(params).__name__}", expected="PoolingParams")
        if params.dimensions is not None and params.dimensions > self.width:
            raise RequestError(
                f"{params.dimensions} dimensions of a vector of {self.width}",
                where="PoolingParams.dimensions",
                expected=f"1 to {self.width}",
            )
        if params.normalize is None:
            params = replace(params, normalize=self.unit)
        salt = (prompt.cache_salt or "").encode("utf-8", "surrogatepass")
        own_id, ids = self._own_id(given.request_id, 0), list(prompt.token_ids)  # a copy: callers get the other list
        request = Request(Given(own_id, ids, params, cache_salt=salt, priority=given.priority, streamed=False))
        self._scheduler.check(request)
        return _Group(given.request_id, prompt, params, request)

    def _queue(self, group: _Group) -> None:
        self._by_request[group.request] = group, None
        self._scheduler.add(group.request)

    def _read(self, handle: SampledStep) -> torch.Tensor:
        return handle.vectors()

    def _retire(self, batch: StepBatch, handle: SampledStep, read: torch.Tensor) -> list[EmbeddingOutput]:
        finite: list[bool] = read.isfinite().all(1).tolist()
        outputs: list[EmbeddingOutput] = []
        for request, place in self._scheduler.retire_pooled(batch, finite):
            group, _ = self._by_request[request]
            if finite[place]:
                group.vector = read[place, : group.params.dimensions].tolist()
            outputs.append(group.output(finished=True))
            self._forget(group)
        return outputs
