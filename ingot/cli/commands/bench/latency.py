"""`ingot bench latency`: measure how long one batch of equal requests takes."""

from typing import TYPE_CHECKING, Any

from ingot.cli.commands import ArtifactFolder, Variant
from ingot.cli.commands.bench import options, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingot.bench.engine import BenchEngine
    from ingot.bench.workload import Lengths
    from ingot.cli.progress import OnProgress


def bench_latency(
    artifact: ArtifactFolder,
    /,
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    seed: int = 0,
    variant: Variant = None,
    json: options.JsonFile = None,
) -> None:
    """Measure the latency of one batch of equal requests, from submission to the last token.

    Prompts are random token ids, new ones for each batch. Outputs are greedy and ignore the end tokens. Ctrl-C stops
    the measurement and reports the batches measured so far.

    Parameters
    ----------
    input_len
        Tokens of each prompt.
    output_len
        Tokens to generate for each prompt.
    batch_size
        Requests of the batch.
    num_iters_warmup
        Batches before the measured ones.
    num_iters
        Measured batches.
    seed
        Seed of the prompts.
    json
        Also write the result to this file. "-" writes only the result to stdout. Its fields are those of `vllm bench
        latency`.
    """
    options.at_least(1, input_len=input_len, output_len=output_len, batch_size=batch_size, num_iters=num_iters)
    options.at_least(0, num_iters_warmup=num_iters_warmup)
    options.check_file(json)
    from ingot.bench.answer import answer
    from ingot.bench.engine import open_engine
    from ingot.bench.metrics import latency_metrics
    from ingot.bench.workload import equal_lengths
    from ingot.cli.progress import live_progress
    from ingot.runtime.loading.artifact import open_artifact

    opened = open_artifact(artifact, verify=False, variant=variant)
    longest = options.limit(opened, "max_seq_len")
    options.at_most(longest, opened, "tokens of a sequence", input_len=input_len, output_len=output_len)
    options.at_most(options.limit(opened, "max_batch"), opened, "sequences at once", batch_size=batch_size)
    asked: dict[str, Any] = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    with live_progress() as progress:
        progress("load", 0, 0)
        engine = open_engine(opened.folder, stream=False)
        lengths = equal_lengths(batch_size, input_len, output_len)
        latencies, interrupted = _measure(engine, lengths, num_iters_warmup, num_iters, seed, progress)
    if latencies:
        metrics = latency_metrics(latencies)
        asked |= {"num_iters": len(latencies), "seed": seed, "interrupted": interrupted}
        rows = [
            ("mean", tell.seconds(metrics["avg_latency"])),
            ("standard deviation", tell.seconds(metrics["std_latency"])),
            *((f"{percent} %", tell.seconds(value)) for percent, value in metrics["percentiles"].items()),
        ]
        title = f"{batch_size} × {input_len} tokens in, {output_len} out: {len(latencies)} batches"
        tell.report(json, answer(opened, asked, metrics), title, rows)
    if interrupted:
        raise KeyboardInterrupt


def _measure(
    engine: "BenchEngine", lengths: "Sequence[Lengths]", warm_up: int, count: int, seed: int, progress: "OnProgress"
) -> tuple[list[float], bool]:
    """Serve batches of requests and time them. `lengths` has the prompt and output tokens of each request of a batch.

    The first `warm_up` batches are not timed, the next `count` batches are. Return the seconds of each timed batch, and
    True if an interrupt ended the measurement early.
    """
    from ingot.bench.drive import drive
    from ingot.bench.workload import make_workload

    latencies: list[float] = []
    try:
        for index in range(warm_up + count):
            warming = index < warm_up
            phase, done, of = ("warm up", index, warm_up) if warming else ("measure", index - warm_up, count)
            progress(phase, done, of)
            # A new seed for each batch, so that the prefix cache has no hits.
            run = drive(engine, make_workload(lengths, engine.tokens, seed + index))
            if run.interrupted:
                return latencies, True
            if not warming:
                latencies.append(run.duration)
    except KeyboardInterrupt:
        return latencies, True
    return latencies, False
