"""Measure an artifact for a mesh next to one of the same model for one device.

    python benchmarks/mesh.py ONE MESH [MESH …] [--rounds 1] [--batch 1,32] [--prompt 4000] [--requests 512]
        [--input 512] [--output 256] [--json FILE]

Each artifact runs in a process of its own, through `ingot.LLM`, with CUDA graphs captured before. decode_method.py
measures decode steps. The first token of a long prompt is the shortest of three tries with other prompts. Then all
requests are given at once, after a warm-up of 64 of them. A count of 0 leaves a part out. Figures of the mesh end with
how many times faster it is. Several artifacts for meshes, such as one with sums by NCCL, are compared by their names.

All artifacts run in turns, as often as `--rounds` says, so that a change of the machine reaches all of them. A figure
is the median of the rounds.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode_method import lengths_of, measure_decode
from engine import limits_of
from results import Figure, add_json_option, report

from ingot import LLM, SamplingParams

_TRIES = 3
_WARM_UP = 64  # requests
_SECONDS = 580.0  # for one artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path, help="the artifact for one device")
    parser.add_argument("meshes", type=Path, nargs="*", metavar="mesh", help="an artifact for a mesh")
    parser.add_argument("--rounds", type=int, default=1, help="how often each artifact is measured")
    parser.add_argument("--batch", default="1,32", help="batch sizes of decode steps, separated by commas")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--requests", type=int, default=512, help="requests that are given at once")
    parser.add_argument("--input", type=int, default=512, help="tokens of each such prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each such output")
    add_json_option(parser)
    options = parser.parse_args()
    if not options.meshes:  # a child, which measures one artifact
        print(json.dumps({name: one.model_dump() for name, one in measure(options.one, options).items()}), flush=True)
        return
    names = {"one": options.one, **mesh_names(options.meshes)}
    settings = {name: getattr(options, name) for name in ("batch", "prompt", "requests", "input", "output")}
    rounds = [{name: run_child(path, settings) for name, path in names.items()} for _ in range(options.rounds)]
    given = {name: path.name for name, path in names.items()}
    report(__file__, options.json, {**given, "rounds": options.rounds, **settings}, compared(rounds))


def mesh_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the artifacts for meshes by the names of their figures: "mesh", or those of the files if there are more.

    Exits if two have one name.
    """
    if len(paths) == 1:
        return {"mesh": paths[0]}
    found = {path.stem: path for path in paths}
    if len(found) < len(paths) or "one" in found:
        sys.exit("two artifacts have one name: their file names must differ, and none may be 'one'")
    return found


def compared(rounds: Sequence[Mapping[str, Mapping[str, Figure]]]) -> dict[str, Figure]:
    """Return the figures of all artifacts by name, and how many times faster than "one" each other artifact is.

    `rounds` has the figures of each artifact in each round. A figure is their median.
    """
    found: dict[str, Figure] = {}
    each = {
        name: {figure: _median([one[name][figure] for one in rounds]) for figure in figures}
        for name, figures in rounds[0].items()
    }
    for name, figures in each.items():
        who = {"one": "one device", "mesh": "the mesh"}.get(name, name)
        for figure, own in figures.items():
            found[f"{name}.{figure}"] = own.model_copy(update={"what": f"{who}: {own.what}"})
            if name != "one":
                alone = each["one"][figure].value
                faster = own.value / alone if own.more_is_better else alone / own.value
                found[f"{name}.{figure}.faster"] = Figure(value=faster, unit="", what=f"{who}: {own.what}, faster by")
    return found


def _median(rounds: Sequence[Figure]) -> Figure:
    """Return the figure with the median of several rounds; with one round, that figure itself."""
    if len(rounds) == 1:
        return rounds[0]
    values = tuple(one.value for one in rounds)
    return rounds[0].model_copy(update={"value": statistics.median(values), "values": values})


def run_child(artifact: Path, settings: Mapping[str, str | int]) -> dict[str, Figure]:
    """Measure one artifact in a process of its own, with the options of this one."""
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, __file__, str(artifact), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SECONDS)
    if done.returncode:
        sys.exit(f"measuring {artifact} failed with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: Figure.model_validate({**one, "values": tuple(one["values"])}) for name, one in found.items()}


def measure(artifact: Path, options: argparse.Namespace) -> dict[str, Figure]:
    """Return the figures of one artifact by name."""
    begin = time.perf_counter()
    llm = LLM(artifact, cuda_graphs="all")
    loaded = time.perf_counter() - begin
    limits, draw = limits_of(artifact), random.Random(0)

    def generate(prompts: Any, count: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return outputs

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[draw.randrange(limits["vocab_size"]) for _ in range(tokens)] for _ in range(count)]

    def seconds(given: list[list[int]], count: int) -> float:
        begin = time.perf_counter()
        generate(given, count)
        return time.perf_counter() - begin

    found = {"load": Figure(value=loaded, unit="s", what="loading, with all CUDA graphs captured")}
    for batch in (int(text) for text in options.batch.split(",") if int(text)):
        lengths = lengths_of(batch)
        step = measure_decode(generate, limits["vocab_size"], batch, lengths).step
        what = f"a decode step of {batch}, at a mean context of {lengths.context:g}"
        found[f"batch_{batch}_step"] = Figure(value=step, unit="s", what=what)
    if options.prompt:
        seconds(prompts(1, options.prompt), 1)
        tries = tuple(seconds(prompts(1, options.prompt), 1) for _ in range(_TRIES))
        what = f"the first token after a prompt of {options.prompt}, the least"
        found["first_token"] = Figure(value=min(tries), unit="s", what=what, values=tries)
    if options.requests:
        seconds(prompts(min(_WARM_UP, options.requests), options.input), min(8, options.output))
        took = seconds(prompts(options.requests, options.input), options.output)
        what = f"{options.requests} requests of {options.input} tokens in and {options.output} out, given at once"
        found["throughput"] = Figure(value=options.requests * options.output / took, unit="tokens/s", what=what)
    return found


if __name__ == "__main__":
    main()
