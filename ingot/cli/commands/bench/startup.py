"""`ingot bench startup`: measure the time from the start of a process until it can serve, and to its first token."""

from pathlib import Path

from ingot.cli.commands import ArtifactFolder, Variant
from ingot.cli.commands.bench import options, tell
from ingot.ir.errors import ArtifactError


def bench_startup(
    artifact: ArtifactFolder,
    /,
    *,
    num_iters: int = 5,
    input_len: int = 128,
    timeout: float = 300.0,
    variant: Variant = None,
    json: options.JsonFile = None,
) -> None:
    """Measure the time from the start of a process until it can serve, and to its first token.

    Each start is a new process. All files of the artifact are in the page cache. Ctrl-C stops the measurement and
    reports the starts measured so far.

    Parameters
    ----------
    num_iters
        Number of starts.
    input_len
        Tokens of the prompt.
    timeout
        Seconds after which a start fails.
    json
        Also write the result to this file. "-" writes only the result to stdout. It has the fields of `vllm bench
        startup` for warm starts, and more.
    """
    options.at_least(1, num_iters=num_iters, input_len=input_len)
    options.positive(timeout=timeout)
    options.check_file(json)
    from ingot.bench.answer import answer
    from ingot.bench.children import ChildError
    from ingot.bench.startup import Start, start, startup_metrics
    from ingot.cli.progress import live_progress
    from ingot.runtime.loading.artifact import open_artifact

    opened = open_artifact(Path(artifact), verify=False, variant=variant)
    longest = options.limit(opened, "max_seq_len")
    options.at_most(longest - 1, opened, "tokens of a sequence but one", input_len=input_len)
    starts: list[Start] = []
    interrupted = False
    with live_progress() as progress:
        try:
            for index in range(num_iters):
                progress("start", index, num_iters)
                starts.append(start(opened.folder, tokens=input_len, timeout=timeout))
        except KeyboardInterrupt:
            interrupted = True
        except ChildError as error:
            raise ArtifactError(
                f"the artifact does not start on this machine: {error}", where=str(opened.folder)
            ) from error
    if starts:
        metrics = startup_metrics(starts)
        asked = {"num_iters": len(starts), "input_len": input_len, "interrupted": interrupted}
        rows = [
            ("ready", tell.seconds(metrics["median_ready_time"])),
            ("first token", tell.seconds(metrics["median_first_token_time"])),
            *((f"  {name}", tell.seconds(value)) for name, value in metrics["phases"].items()),
            *((f"    {name}", tell.seconds(value)) for name, value in metrics["loading"].items()),
        ]
        title = f"{len(starts)} starts, the median; phases of the median start"
        tell.report(json, answer(opened, asked, metrics), title, rows)
    if interrupted:
        raise KeyboardInterrupt
