"""Measure an artifact for a mesh next to one of the same model for one device.

    python benchmarks/mesh.py ONE MESH [MESH …] [--rounds 1] [--batch 1,32] [--prompt 4000] [--requests 512]
        [--input 512] [--output 256] [--busy 64] [--starts 3] [--peer-site FOLDER --checkpoint FOLDER]
        [--peer-caches FOLDER] [--only one,mesh,peer] [--json FILE]

Each artifact runs in a process of its own, through `ingot.LLM`, with CUDA graphs captured before. decode_method.py
measures decode steps. The first token of a long prompt is the shortest of three tries with other prompts. Then all
requests are given at once, after a warm-up of 64 of them. stages.py measures how busy the pipeline stages of an
artifact are, with `--busy` requests. The time from the start of a process to its first token is the least of
`--starts`. A count of 0 leaves a part out. Figures of the mesh end with how many times faster it is. Several artifacts
for meshes, such as one with sums by NCCL, are compared by their names. The bytes that a decode step of a rank must move
(traffic.py) are compared with a plain copy of one GPU, but for pipeline stages, which run one after another.

All artifacts run in turns, as often as `--rounds` says, so that a change of the machine reaches all of them. A figure
is the median of the rounds. The peer is vLLM in FOLDER, with the tensor parallelism of the first mesh; peer.py measures
it on the checkpoint, once, after the rounds, with the caches of `--peer-caches`, if given. `--only` measures a part:
the figures of the others stay in the file of `--json`, if they are of the same commit.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode_method import PROMPT_TOKENS, lengths_of, measure_decode
from engine import device_of, limits_of
from results import Figure, add_json_option, print_figures, read_result, revision, write_result
from traffic import step_traffic

from ingot import LLM, SamplingParams
from ingot.bench.children import ChildError, run_command
from ingot.bench.startup import start
from ingot.ir.artifact.manifest_file import mesh_in
from ingot.ir.mesh import STAGES, parse_mesh

_TRIES = 3
_WARM_UP = 64  # requests
_SECONDS = 580.0  # for one artifact, or for the peer
_BUSY_TOKENS = 256  # tokens of each request while stages are measured
_PEER = "peer"
# Phases of loading that take less are left out.
_LEAST_PHASE = 0.1
# The names of peer.py's figures, and those of the same figures here.
_PEER_NAMES = {"throughput": "throughput", "cold_first_token": "start"}


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
    parser.add_argument("--busy", type=int, default=64, help="requests that keep the stages of an artifact busy")
    parser.add_argument("--starts", type=int, default=3, help="new processes whose first token is timed")
    parser.add_argument("--peer-site", type=Path, help="a folder to import vLLM from")
    parser.add_argument("--peer-caches", type=Path, help="a folder for vLLM's caches; its start is not measured then")
    parser.add_argument("--checkpoint", type=Path, help="the checkpoint of the artifacts, for vLLM")
    parser.add_argument("--only", help="names of artifacts to measure, or 'peer', separated by commas")
    add_json_option(parser)
    options = parser.parse_args()
    if not options.meshes:  # a child, which measures one artifact
        print(json.dumps({name: one.model_dump() for name, one in measure(options.one, options).items()}), flush=True)
        return
    if (options.peer_site is None) is not (options.checkpoint is None):
        parser.error("--peer-site and --checkpoint are given together")
    names = {"one": options.one, **mesh_names(options.meshes)}
    asked = chosen(options.only, [*names, *([] if options.peer_site is None else [_PEER])])
    settings = {name: getattr(options, name) for name in ("batch", "prompt", "requests", "input", "output")}
    found = earlier(options.json, {} if options.only is None else {*names, _PEER} - {*asked})
    rounds = [
        {
            name: {
                **run_child(path, settings),
                **stage_figures(path, options.busy),
                **starts(path, options.starts),
            }
            for name, path in names.items()
            if name in asked
        }
        for _ in range(options.rounds)
    ]
    found |= of_rounds(rounds)
    batches = [int(text) for text in options.batch.split(",") if int(text)]
    found |= copy_figures(names, found, batches)
    versions: dict[str, str] = {}
    if _PEER in asked:
        figures, versions = run_peer(options, parse_mesh(mesh_in(options.meshes[0])).get("tp", 1))
        found |= figures
    found = with_ratios(found)
    print_figures(found)
    if options.json is not None:
        given = {name: path.name for name, path in names.items()}
        counts = {name: getattr(options, name) for name in ("rounds", "starts", "busy")}
        about = {**given, **counts, **settings}
        if any(name.startswith(f"{_PEER}.") for name in found):
            about["peer"] = "vLLM"
        folder = options.json.parent
        print(write_result(__file__, options.json.stem, about, found, versions=versions, folder=folder))


def mesh_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the artifacts for meshes by the names of their figures: "mesh", or those of the files if there are more.

    Exits if two have one name.
    """
    if len(paths) == 1:
        return {"mesh": paths[0]}
    found = {path.stem: path for path in paths}
    if len(found) < len(paths) or {"one", _PEER} & found.keys():
        sys.exit("two artifacts have one name: their file names must differ, and none may be 'one' or 'peer'")
    return found


def chosen(only: str | None, known: Sequence[str]) -> list[str]:
    """Return the names to measure: those in `only`, or all. Exits for a name that is not known."""
    if only is None:
        return list(known)
    if unknown := [name for name in only.split(",") if name not in known]:
        sys.exit(f"--only names {', '.join(unknown)}: choose from {', '.join(known)}")
    return only.split(",")


def earlier(file: Path | None, names: set[str] | dict[str, Path]) -> dict[str, Figure]:
    """Return the figures of some names in an earlier result, if it is of the same commit."""
    if file is None or not names or not file.exists() or (result := read_result(file)).revision != revision():
        return {}
    return {
        name: figure
        for name, figure in result.figures.items()
        if name.partition(".")[0] in names and not name.endswith((".faster", ".than_peer"))
    }


def of_rounds(rounds: Sequence[Mapping[str, Mapping[str, Figure]]]) -> dict[str, Figure]:
    """Return the figures of all artifacts by name. `rounds` has the figures of each artifact in each round; a figure is
    their median."""
    found: dict[str, Figure] = {}
    for name, figures in rounds[0].items():
        who = {"one": "one device", "mesh": "the mesh"}.get(name, name)
        for figure in figures:
            own = _median([one[name][figure] for one in rounds if figure in one[name]])
            found[f"{name}.{figure}"] = own.model_copy(update={"what": f"{who}: {own.what}"})
    return found


def copy_figures(
    artifacts: Mapping[str, Path], found: Mapping[str, Figure], batches: Sequence[int]
) -> dict[str, Figure]:
    """Return the bandwidth of a plain copy, and the share of it that decode steps of `batches` in `found` reach.

    `artifacts` are the paths by the names of figures. The bytes are those of one rank. An artifact with stages has no
    share.
    """
    tp_alone = {name: path for name, path in artifacts.items() if STAGES not in parse_mesh(mesh_in(path))}
    steps = {
        (name, batch): figure
        for name in tp_alone
        for batch in batches
        if (figure := found.get(f"{name}.batch_{batch}_step")) is not None
    }
    if not steps:
        return {}
    code = "import sys; from copy_bandwidth import copy_bandwidth; print(copy_bandwidth(sys.argv[1]))"
    device = device_of(next(iter(tp_alone.values())))
    command = [sys.executable, "-c", code, device]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    copy = float(done.stdout)
    shares = {"copy": Figure(value=copy, unit="B/s", what="a plain copy of one device, read and written, the best")}
    for (name, batch), step in steps.items():
        share = step_traffic(tp_alone[name], batch, lengths_of(batch).context).bytes / step.value / copy
        shares[f"{name}.batch_{batch}_of_copy"] = Figure(
            value=share, unit="", what=f"{step.what}: its bytes of one rank, of the copy's bandwidth"
        )
    return shares


def with_ratios(found: Mapping[str, Figure]) -> dict[str, Figure]:
    """Return figures, and how many times faster each mesh is: than one device, and than the peer."""
    more = dict[str, Figure]()
    for key, own in found.items():
        name, _, figure = key.partition(".")
        more[key] = own
        if name in ("one", _PEER) or figure.endswith("_of_copy"):
            continue
        for other, ending, text in (("one", "faster", "faster by"), (_PEER, "than_peer", "faster than vLLM by")):
            if (theirs := found.get(f"{other}.{figure}")) is not None:
                faster = own.value / theirs.value if own.more_is_better else theirs.value / own.value
                more[f"{key}.{ending}"] = Figure(value=faster, unit="", what=f"{own.what}, {text}")
    return more


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
    return figures_of(done.stdout)


def starts(artifact: Path, tries: int) -> dict[str, Figure]:
    """Return the least time from the start of a process to the first token of an artifact, as cold_start.py does."""
    if not tries:
        return {}
    try:
        each = tuple(start(artifact, tokens=PROMPT_TOKENS, timeout=_SECONDS).first_token for _ in range(tries))
    except ChildError as error:
        sys.exit(f"{artifact} generated no token: {error}")
    return {"start": Figure(value=min(each), unit="s", what="start of the process to its first token", values=each)}


def run_peer(options: argparse.Namespace, tensor_parallel: int) -> tuple[dict[str, Figure], dict[str, str]]:
    """Measure vLLM by peer.py on as many GPUs, with the options of this script. Return its figures under the names of
    those of the artifacts, and the versions of packages."""
    script = Path(__file__).with_name("peer.py")
    load = {name: getattr(options, name) for name in ("prompt", "requests", "input", "output")}
    arguments = [text for name, value in load.items() for text in (f"--{name}", str(value))]
    arguments += ["--spread", "0", "--arrivals", "0", "--sharing", "0", "--batch", options.batch]
    arguments += ["--tensor-parallel", str(tensor_parallel), "--one-start", "--timeout", f"{_SECONDS:.0f}"]
    if options.peer_caches is not None:
        arguments += ["--caches", str(options.peer_caches)]
    with tempfile.TemporaryDirectory(prefix="ingot-mesh-") as folder:
        file = Path(folder) / "peer.json"
        asked: list[str | Path] = [sys.executable, script, options.checkpoint, "--peer", "vllm", "--site"]
        try:
            run_command([*asked, options.peer_site, *arguments, "--json", file], timeout=_SECONDS, echo=True)
        except ChildError as error:
            sys.exit(f"vLLM was not measured: {error}")
        result = read_result(file)
    found: dict[str, Figure] = {}
    version = ""
    for name, figure in result.figures.items():
        _, version, own = name.split("_", 2)
        own = "first_token" if own == f"prompt_{options.prompt}" else _PEER_NAMES.get(own, own)
        if own in ("first_token", "throughput", "start") or own.endswith("_step"):
            what = f"vLLM {version}, tp={tensor_parallel}: {figure.what}"
            found[f"{_PEER}.{own}"] = figure.model_copy(update={"what": what})
    return found, {"vllm": version}


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

    found = {"load": Figure(value=loaded, unit="s", what="loading, with all CUDA graphs captured"), **phases(llm)}
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


def phases(llm: LLM) -> dict[str, Figure]:
    """Return the phases of loading of each rank that take long, with the second after the call in which each began."""
    found: dict[str, Figure] = {}
    timeline = llm.timeline
    first = min(one.begin for spans in timeline.values() for one in spans)
    for rank, spans in timeline.items():
        for one in sorted(spans, key=lambda span: span.begin):
            if one.end - one.begin >= _LEAST_PHASE:
                name = f"load.rank{rank}.{one.name.replace(' ', '_')}"
                what = f"loading: {one.name} of rank {rank}, which began after {one.begin - first:.2f} s"
                before = found.get(name)
                took = one.end - one.begin + (0.0 if before is None else before.value)
                found[name] = Figure(value=took, unit="s", what=what if before is None else before.what)
    return found


def stage_figures(artifact: Path, requests: int) -> dict[str, Figure]:
    """Return how busy each pipeline stage of an artifact is, measured in a process of its own."""
    if not requests or STAGES not in parse_mesh(mesh_in(artifact)):
        return {}
    code = "import json, pathlib, stages, sys; path, *counts = sys.argv[1:]; "
    code += "found = stages.measure(pathlib.Path(path), *map(int, counts)); "
    code += "print(json.dumps({name: one.model_dump() for name, one in found.items()}))"
    command = [sys.executable, "-c", code, str(artifact), str(requests), str(_BUSY_TOKENS)]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, timeout=_SECONDS)
    if done.returncode:
        sys.exit(f"measuring the stages of {artifact} failed with status {done.returncode}")
    found = figures_of(done.stdout)
    return {name if name.startswith("stage_") else f"busy_{name}": one for name, one in found.items()}


def figures_of(output: str) -> dict[str, Figure]:
    """Return the figures in the last line of a child's output."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {name: Figure.model_validate({**one, "values": tuple(one["values"])}) for name, one in found.items()}


if __name__ == "__main__":
    main()
