"""`ingot bench throughput`: measure the tokens per second of many requests that are submitted at once."""

from ingot.cli.commands import ArtifactFolder, Variant
from ingot.cli.commands.bench import options, tell
from ingot.cli.commands.bench.requests import EQUAL, Requests
from ingot.cli.commands.bench.served import serve


def bench_throughput(
    artifact: ArtifactFolder,
    /,
    *,
    requests: Requests = EQUAL,
    variant: Variant = None,
    json: options.JsonFile = None,
) -> None:
    """Measure the tokens per second of many requests that are submitted at once.

    Prompts are random token ids. Outputs are greedy and ignore the end tokens. Ctrl-C stops the measurement and reports
    what was measured so far.

    Parameters
    ----------
    json
        Also write the result to this file. "-" writes only the result to stdout. Its fields are those of `vllm bench
        throughput`.
    """
    requests.check()
    options.check_file(json)
    from ingot.bench.answer import answer
    from ingot.bench.metrics import throughput_metrics
    from ingot.runtime.loading.artifact import open_artifact

    opened = open_artifact(artifact, verify=False, variant=variant)
    lengths = requests.lengths(opened)
    run, steps = serve(opened, lengths, prefix_len=requests.prefix_len, seed=requests.seed, stream=False)
    metrics = throughput_metrics(run)
    asked = {**requests.asked(), "interrupted": run.interrupted}
    rows = [
        ("requests", f"{metrics['num_requests']:,} in {tell.seconds(metrics['elapsed_time'])}"),
        ("throughput", tell.per_second(metrics["requests_per_second"], "requests")),
        ("", tell.per_second(metrics["tokens_per_second"], "tokens", ", in and out")),
        ("", tell.per_second(metrics["output_tokens_per_second"], "tokens", ", out alone")),
        *tell.step_rows(steps),
    ]
    tell.report(json, answer(opened, asked, {**metrics, "steps": steps}), f"{requests.dataset}, at once", rows)
    if run.interrupted:
        raise KeyboardInterrupt
