"""`ingot bench throughput`: how many tokens a second come of many requests that are given at once."""

from ingot.commands.bench import options, tell
from ingot.commands.bench.served import serve


def bench_throughput(
    artifact: str,
    /,
    *,
    dataset: options.Dataset = "random",
    num_prompts: int = 1000,
    input_len: int = 1024,
    output_len: int = 128,
    prefix_len: int = 0,
    seed: int = 0,
    json: options.JsonFile = None,
) -> None:
    """Measure how many tokens a second come of many requests that are given at once.

    Prompts are random token ids; outputs are greedy and go on past the end tokens. Ctrl-C ends it with what was
    measured so far.

    Parameters
    ----------
    artifact
        An artifact folder.
    dataset
        random: all lengths are equal. sharegpt: drawn as those of ShareGPT's conversations are spread.
    num_prompts
        Requests.
    input_len
        Tokens of each prompt, with --dataset random.
    output_len
        Tokens to make behind each, with --dataset random.
    prefix_len
        Tokens in front of each prompt that are the same in all of them.
    seed
        Of prompts and lengths.
    json
        Write the result to this file too, or to stdout alone for "-"; its fields are those of `vllm bench throughput`.
    """
    options.at_least(1, num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    options.at_least(0, prefix_len=prefix_len)
    options.check_file(json)
    from ingot.bench.answer import answer
    from ingot.bench.metrics import throughput_metrics
    from ingot.runtime.artifact import open_artifact

    opened = open_artifact(artifact, verify=False)
    lengths = options.lengths_of(opened, dataset, num_prompts, input_len, output_len, prefix_len, seed)
    run, steps = serve(opened, lengths, prefix_len=prefix_len, seed=seed, stream=False)
    metrics = throughput_metrics(run)
    asked = {
        "dataset": dataset,
        "num_prompts": num_prompts,
        "prefix_len": prefix_len,
        "seed": seed,
        "interrupted": run.interrupted,
    }
    equal = {"input_len": input_len, "output_len": output_len} if dataset == "random" else {}
    rows = [
        ("requests", f"{metrics['num_requests']:,} in {tell.seconds(metrics['elapsed_time'])}"),
        ("throughput", tell.per_second(metrics["requests_per_second"], "requests")),
        ("", tell.per_second(metrics["tokens_per_second"], "tokens", ", in and out")),
        ("", tell.per_second(metrics["output_tokens_per_second"], "tokens", ", out alone")),
        *tell.step_rows(steps),
    ]
    tell.report(json, answer(opened, {**asked, **equal}, {**metrics, "steps": steps}), f"{dataset}, at once", rows)
    if run.interrupted:
        raise KeyboardInterrupt
