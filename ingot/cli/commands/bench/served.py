"""Run a workload on an artifact, with progress on stderr."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.cli.progress import OnProgress, live_progress

if TYPE_CHECKING:
    from ingot.bench.drive import Run
    from ingot.bench.engine import BenchEngine
    from ingot.bench.workload import Lengths
    from ingot.runtime.artifact import Artifact

_WARM_UP_TOKENS = 8  # per output; a batch of these reaches every size of decode step


def serve(
    artifact: "Artifact",
    lengths: "Sequence[Lengths]",
    *,
    prefix_len: int,
    seed: int,
    stream: bool,
    arrivals: Sequence[float] | None = None,
    max_concurrency: int | None = None,
) -> "tuple[Run, dict[str, Any]]":
    """Serve requests of these lengths, and return the run and the figures of its steps (`step_metrics`).

    All requests arrive at once, or at `arrivals`, in seconds. Prompts begin with `prefix_len` common tokens. `stream`
    serves them as streams. At most `max_concurrency` run at a time. Raises KeyboardInterrupt if an interrupt comes
    before a request is completed.
    """
    from ingot.bench.drive import drive
    from ingot.bench.engine import open_engine
    from ingot.bench.steps import step_metrics
    from ingot.bench.workload import make_workload

    with live_progress() as progress:
        progress("load", 0, 0)
        engine = open_engine(artifact.folder, stream=stream)
        _warm_up(engine, lengths, prefix_len, seed, progress)
        run = drive(
            engine,
            make_workload(lengths, engine.tokens, seed, arrivals=arrivals, shared_prefix=prefix_len),
            max_concurrency=max_concurrency,
            on_finished=lambda count: progress("measure", count, len(lengths)),
        )
    if run.interrupted and not run.completed:
        raise KeyboardInterrupt
    return run, step_metrics(engine.executor.steps, run.duration)


def _warm_up(
    engine: "BenchEngine", lengths: "Sequence[Lengths]", prefix_len: int, seed: int, progress: OnProgress
) -> None:
    """Serve short requests with other prompts and another prefix, to trigger one-time setup. Discard their times."""
    from ingot.bench.drive import drive
    from ingot.bench.workload import Lengths, make_workload

    short = [Lengths(one.prompt, min(one.output, _WARM_UP_TOKENS)) for one in lengths[: engine.limits.max_batch]]
    progress("warm up", 0, len(short))
    run = drive(
        engine,
        make_workload(short, engine.tokens, seed - 1, shared_prefix=prefix_len),
        on_finished=lambda count: progress("warm up", count, len(short)),
    )
    engine.executor.steps.clear()
    if run.interrupted:
        raise KeyboardInterrupt
