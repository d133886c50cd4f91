"""The error of a call whose requests have all failed, for example because an artifact's kernels compute no numbers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ingot.ir.errors import GenerationError
from ingot.runtime.engines.beams import BeamSearchSequence
from ingot.runtime.engines.outputs import CompletionOutput, EmbeddingOutput, RequestOutput

Output = TypeVar("Output", RequestOutput, EmbeddingOutput)


def checked(outputs: Iterable[Output]) -> Iterator[Output]:
    """Yield `outputs`. After the last one, raise GenerationError if every request has failed."""
    reasons = []
    for output in outputs:
        if output.finished:
            reasons.append(failure(output.outputs if isinstance(output, RequestOutput) else [output]))
        yield output
    raise_if_all_failed(reasons)


def failure(results: Sequence[CompletionOutput | EmbeddingOutput | BeamSearchSequence]) -> str | None:
    """Return why a request with these results has failed; None if one of them did not end with an error."""
    failed = all(one.finish_reason == "error" for one in results)
    return str(results[0].stop_reason) if failed and results else None


def raise_if_all_failed(reasons: Sequence[str | None]) -> None:
    """Raise GenerationError if each request of a call has a reason why it failed.

    One failed request among others is no error of the call: its output has the finish reason "error".
    """
    if not reasons or reasons[0] is None or None in reasons:
        return
    requests = "the request" if len(reasons) == 1 else f"all {len(reasons)} requests"
    raise GenerationError(
        f"{requests} failed: {reasons[0]}",
        expected="tokens or a vector for at least one request",
        hint="`ingot verify ARTIFACT` tests whether an artifact computes what it did when it was compiled",
    )
