"""A caller's request for tokens while the engine serves it, with its n sequences, and how it reports them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.runtime.adapters.host_adapter import HostAdapter
from ingot.runtime.engines.growing import SoFar
from ingot.runtime.engines.logprobs import SequenceLogprobs
from ingot.runtime.engines.outputs import CompletionOutput, RequestOutput
from ingot.runtime.params.prompt import Prompt
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Request

# Returns what `Engine.step` returns for a request that has changed. The second argument is whether all its sequences
# have ended: this is then the last call.
Report = Callable[["RequestGroup", bool], Any]
_ListView = Callable[[list[Any]], Sequence[Any]]  # copies a growing list (`list`), or wraps it without a copy (`SoFar`)


@dataclass(frozen=True)
class GroupSequence:
    """One of the n sequences of a request (SamplingParams.n). `request` is the scheduler's object for it. `logprobs`
    collects its log-probabilities; None if the request wants none."""

    request: Request
    logprobs: SequenceLogprobs | None


@dataclass(frozen=True, eq=False)
class RequestGroup:
    """A caller's request while it is served, with its n sequences.

    stream            report after each step; False: only at the end of all sequences
    prompt_logprobs   collects the log-probabilities of the prompt; None if the request wants none
    report            makes the result of a step for the caller
    adapter           the LoRA adapter that the request uses; None: the model alone
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    stream: bool
    sequences: list[GroupSequence]
    prompt_logprobs: SequenceLogprobs | None
    report: Report
    adapter: HostAdapter | None = None

    @property
    def requests(self) -> list[Request]:
        return [sequence.request for sequence in self.sequences]

    @property
    def finished(self) -> bool:
        return None not in [sequence.request.end for sequence in self.sequences]

    def output(self, finished: bool) -> Any:
        return self.report(self, finished)


def request_output(group: RequestGroup, finished: bool) -> RequestOutput:
    """Return the output of a request so far, with all its sequences. This is the default report."""
    # Most outputs only report the tokens since the last output, so they do not copy the whole lists.
    view: _ListView = list if finished else SoFar
    return RequestOutput(
        group.request_id,
        group.prompt.text,
        group.prompt.token_ids,
        [_completion_output(index, one, view) for index, one in enumerate(group.sequences)],
        finished,
        None if group.prompt_logprobs is None else view(group.prompt_logprobs.entries),
        group.sequences[0].request.cached.num_found,
    )


def _completion_output(index: int, sequence: GroupSequence, view: _ListView) -> CompletionOutput:
    request, logprobs = sequence.request, sequence.logprobs
    reason, stop = (None, None) if request.end is None else request.end
    return CompletionOutput(
        index,
        "" if request.text is None else request.text.text,
        view(request.output_ids),
        None if logprobs is None else logprobs.cumulative,
        None if logprobs is None else view(logprobs.entries),
        reason,
        stop,
    )
