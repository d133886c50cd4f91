"""Run a workload on an artifact, with progress on stderr."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.cli.progress import OnProgress, live_progress

if TYPE_CHECKING:
    from ingot.bench.drive import Run
    from ingot.bench.engine import BenchEngine
    from ingot.bench.workload import Lengths
    from ingot.runtime.loading.artifact import Artifact

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
    """Load the artifact and serve a request for each of `lengths`. Return the run, and the times of its steps.

    The times are the dict that `step_metrics` returns. `arrivals` has the arrival time of each request in seconds. If
    it is None, all requests arrive at once. Prompts begin with `prefix_len` common tokens. With `stream`, output is
    reported at every token. At most `max_concurrency` requests run at a time.

    Raises KeyboardInterrupt if the user interrupts before any request has completed.
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
    """Serve short requests before the measurement, so that one-time setup is done. Their times are discarded.

    The warm-up has other prompts and another shared prefix. So the prefix cache has no hits in the measurement.
    """
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
