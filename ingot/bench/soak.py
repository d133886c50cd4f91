"""Run a soak test: serve many kinds of requests in real time, and check that each ends as expected."""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ingot.bench.drive import wait_until
from ingot.bench.soak_load import SoakRequest
from ingot.ir.errors import RequestError
from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.engines.outputs import RequestOutput

# An engine that reports no request for this long has lost them. A healthy one is silent at most while a slow CPU serves
# many requests without streaming, of some thousand tokens each.
_PATIENCE_SECONDS = 300.0


@dataclass
class Outcome:
    """What happened to one request of a soak test. Times are in seconds from the beginning of the test.

    - `first`: time of its first token; nan if it has none, or if its output was not streamed
    - `tokens`: number of generated tokens of all its sequences
    - `token_ids`: output of a probe (a request that is also served alone, to compare the outputs), empty for other
      requests
    - `ended`: "stop", "length", "abort", "error" or "refused"; "" if the request has not ended
    - `fault`: what is wrong with the request's result, in words; "" if nothing is
    """

    first: float = math.nan
    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    ended: str = ""
    fault: str = ""


@dataclass
class Soak:
    """The result of a soak test. `requests` are in order of arrival, and `outcomes` has one for each.

    `most_running` is the largest number of requests that ran at one time. `most_waiting` is the largest number that
    waited.
    """

    requests: Sequence[SoakRequest]
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    most_running: int = 0
    most_waiting: int = 0

    def __post_init__(self) -> None:
        # Allocate all outcomes first, so that later notes do not look like a leak.
        self.outcomes = [Outcome() for _ in self.requests]


def run_soak(
    engine: Engine,
    requests: Sequence[SoakRequest],
    *,
    longest: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Soak:
    """Serve `requests` until all have ended, and return their outcomes.

    `requests` are in order of arrival. Each is added to the engine when it arrives. A request with a `cancel` is
    cancelled later. `longest` is the maximum number of tokens of a sequence. Errors of a step propagate.

    The loop stops early if the engine reports no request for `_PATIENCE_SECONDS`. Requests that have not ended then
    have `ended` "".
    """
    soak = Soak(requests)
    pending = deque(enumerate(requests))
    leaving: list[tuple[int, int]] = []  # (step, request): the heap of requests to cancel
    steps, begin = 0, clock()
    heard = begin
    while pending or engine.has_unfinished():
        while pending and pending[0][1].arrival <= clock() - begin:
            index, request = pending.popleft()
            _add(engine, soak, index, request)
            if request.cancel is not None and not soak.outcomes[index].ended:
                heapq.heappush(leaving, (steps + request.cancel.steps, index))
        while leaving and leaving[0][0] <= steps:
            _, index = heapq.heappop(leaving)
            _cancel(engine, soak, index)
        if not engine.has_unfinished():
            if pending and not engine.idle():
                wait_until(pending[0][1].arrival, begin, clock, sleep)
            heard = clock()
            continue
        outputs = engine.step()
        steps += 1
        now = clock()
        for output in outputs:
            _note(soak, output, now - begin, longest)
        heard = now if outputs else heard
        if now - heard > _PATIENCE_SECONDS:
            break
        occupancy = engine.occupancy
        soak.most_running = max(soak.most_running, occupancy.running)
        soak.most_waiting = max(soak.most_waiting, occupancy.waiting)
    soak.seconds = clock() - begin
    return soak


def _add(engine: Engine, soak: Soak, index: int, request: SoakRequest) -> None:
    given = EngineRequest(str(index), request.prompt, request.params, request.stream, request.priority)
    try:
        engine.add_requests([given])
    except RequestError as error:
        soak.outcomes[index].ended = "refused"
        soak.outcomes[index].fault = "" if request.refused else f"was refused: {error}"
    else:
        soak.outcomes[index].fault = "was not refused" if request.refused else ""


def _cancel(engine: Engine, soak: Soak, index: int) -> None:
    request, outcome = soak.requests[index], soak.outcomes[index]
    assert request.cancel is not None
    last = engine.abort(str(index))
    if (last is None) != bool(outcome.ended):
        outcome.fault = "was cancelled after its end" if outcome.ended else "was unknown when it was cancelled"
    if last is not None:
        outcome.ended, outcome.tokens = "abort", _tokens(last)
    if request.cancel.twice and engine.abort(str(index)) is not None:
        outcome.fault = "could be cancelled twice"


def _note(soak: Soak, output: RequestOutput, now: float, longest: int) -> None:
    index = int(output.request_id)
    request, outcome = soak.requests[index], soak.outcomes[index]
    if outcome.ended:
        outcome.fault = outcome.fault or f"was reported after its end by '{outcome.ended}'"
        return
    if request.stream and math.isnan(outcome.first) and _tokens(output):
        outcome.first = now
    if output.finished:
        outcome.ended = _end(output)
        outcome.tokens = _tokens(output)
        outcome.fault = outcome.fault or output_fault(request, output, longest)
        if request.probe is not None:
            outcome.token_ids = tuple(output.outputs[0].token_ids)


def _tokens(output: RequestOutput) -> int:
    return sum(len(sequence.token_ids) for sequence in output.outputs)


def _end(output: RequestOutput) -> str:
    """Return how a request ended: "error" if one of its sequences did, else the finish reason of its first sequence."""
    reasons = [sequence.finish_reason or "" for sequence in output.outputs]
    return "error" if "error" in reasons else reasons[0]


def output_fault(request: SoakRequest, output: RequestOutput, longest: int) -> str:
    """Return what is wrong with the final output of a request, such as its number of tokens, or "" if nothing is.

    The values of the generated tokens are not checked. `longest` is the maximum number of tokens of a sequence.
    """
    params = request.params
    most = min(params.max_tokens or longest, longest - len(request.tokens))
    if tuple(output.prompt_token_ids) != request.tokens or len(output.outputs) != params.n:
        return "has the prompt or the number of sequences of another one"
    if params.prompt_logprobs is not None and len(output.prompt_logprobs or ()) != len(request.tokens):
        return f"has {len(output.prompt_logprobs or ())} log-probabilities for {len(request.tokens)} tokens of a prompt"
    for sequence in output.outputs:
        count = len(sequence.token_ids)
        match sequence.finish_reason:
            case "length" if count != most:
                return f"ended with {count} tokens by its length, which is {most}"
            case "stop" if not params.min_tokens <= count <= most:
                return f"stopped with {count} tokens, of {params.min_tokens} to {most}"
            case "error" | "abort" | None:
                return f"ended by '{sequence.finish_reason}': {sequence.stop_reason}"
        if params.logprobs is not None and len(sequence.logprobs or ()) != count:
            return f"has {len(sequence.logprobs or ())} log-probabilities for {count} tokens"
    return ""
