"""Measure everything for one shape on this machine's GPU, in one call and one result: FOLDER/gpu_SHAPE.json.

    python benchmarks/gpu.py --shape 1b --out FOLDER [--skip serve,… | --only checkpoint,…] [--peer vllm|sglang]
        [--site FOLDER] [--peer-caches FOLDER] [--format int4_g128] [--checkpoints FOLDER] [--name NAME]
        [--revision COMMIT]

checkpoint     random weights of the shape, unless --work has them already
compile        compile-model with empty caches                                    compile_time.py
decode         steps of some batches                                              decode.py
cold_start     start of a process to its first token                              cold_start.py
serve          a long prompt, many requests, arrivals, shared prefixes             serve.py
peer           another engine's starts and steps, and the loads of serve           peer.py
compile_again  compile-model with filled caches, and of few layers                 compile_time.py
With `--options "--max-seq-len 40960" --load "--prompt 4000,32000"` a prompt of 32000 tokens is measured too. Up to 256
requests run at a time, the default of `compile-model`, or as many as `--max-batch` in `--options` says.
A failed part is recorded as missing with its reason, and the next one begins. The result is written after each part, so
that an interrupted call keeps its measurements. A later call with the same --work adds to it, if commit and packages
are the same. So does a call for another peer or another version of it: `--only checkpoint,peer --peer sglang --site
FOLDER`. A peer is measured with the loads of serve, unless `--skip` names serve, and its starts if cold_start is
measured, but not with `--peer-caches`, which an earlier start may have filled. With --format, linears of the checkpoint
are quantized (quantized_weights.py), and the peer reads it too, as that of a mixture of experts (mixtures.py), whose
weights decide the experts that a step reads; else it makes its own weights. `--checkpoints /dev/shm` keeps a large
checkpoint in memory, and a disk has room for the artifact.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compile_time import depth_ratio
from mixtures import MIXTURES
from peers import PEERS
from quantized_weights import FORMATS
from random_checkpoint import SHAPES
from results import REVISION, ROOT, Figure, Result, gpu_result, read_result, revision, write_result

from ingot.bench.children import ChildError, run_child, run_command
from ingot.bench.machine import package_versions

HERE = Path(__file__).parent
PARTS = ("checkpoint", "compile", "decode", "cold_start", "serve", "peer", "compile_again")


@dataclass
class Found:
    """The results of the parts of the benchmark that have run so far.

    `missing` maps a part, or the name of a figure, to the reason why it was not measured.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, *MIXTURES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--work", type=Path, default=Path("/tmp/ingot-gpu"), help="folder for checkpoint and artifact")
    parser.add_argument("--checkpoints", type=Path, help="folder for the checkpoint; not given: that of --work")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--skip", type=part_names, default=(), help="parts to leave out, separated by commas")
    chosen.add_argument("--only", type=part_names, default=PARTS, help="parts to measure, separated by commas")
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--options", default="--max-seq-len 4096", help="options of compile-model, as one string")
    parser.add_argument("--load", default="", help="options of serve.py, also for the peer, as one string")
    parser.add_argument("--format", choices=FORMATS, help="the format of the checkpoint's linears; not given: bfloat16")
    parser.add_argument("--peer", choices=PEERS, default="vllm")
    parser.add_argument("--site", type=Path, help="a folder to import the peer from")
    parser.add_argument("--peer-caches", type=Path, help="a folder for the peer's caches")
    parser.add_argument(
        "--name", help="name of the result, if gpu_SHAPE is taken by another run; as in gpu_8b_long_prompt"
    )
    parser.add_argument("--seconds", type=float, default=560.0, help="for all parts together")
    parser.add_argument("--revision", help="the commit, if this is no git checkout")
    options = parser.parse_args()
    parts = asked_parts(options)
    if not parts:
        sys.exit("no part is left to measure")
    if options.revision:
        os.environ[REVISION] = options.revision
    os.environ[REVISION] = revision()  # fail now if it is unknown; the parts record the same commit
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    check_commands()
    deadline = time.monotonic() + options.seconds
    found = earlier(options)
    for part, command in commands(options):
        if part not in parts:
            continue
        begin = time.monotonic()
        label = options.peer if part == "peer" else part
        run(label, command, found, deadline - begin)
        print(f"== {label}: {found.missing.get(label, 'done')}, {time.monotonic() - begin:.1f} s", flush=True)
        for folder in (work_folder(options), options.out):
            folder.mkdir(parents=True, exist_ok=True)
            path = write(options, found, folder)
    print(path)


def part_names(text: str) -> tuple[str, ...]:
    """Split a text such as "decode,serve" into the names of parts.

    Raises argparse's error for a name that is not in PARTS.
    """
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return names


def asked_parts(options: argparse.Namespace) -> list[str]:
    return [part for part in options.only if part not in options.skip]


def work_folder(options: argparse.Namespace) -> Path:
    """Return the folder of a model shape within --work. It holds the artifact, caches and intermediate result, and the
    checkpoint unless --checkpoints names another folder."""
    folder: Path = options.work / model_name(options)
    return folder


def model_name(options: argparse.Namespace) -> str:
    return "-".join(filter(None, (options.shape, options.format)))


def name_of(options: argparse.Namespace) -> str:
    return options.name or gpu_result(options.shape, options.format)


def earlier(options: argparse.Namespace) -> Found:
    """Return the results of an earlier run of this benchmark with the same --work.

    They are empty if there was none, or if its commit or installed packages were different.
    """
    path = work_folder(options) / f"{name_of(options)}.json"
    if not path.exists() or (result := read_result(path)).revision != os.environ[REVISION]:
        return Found()
    if not package_versions().items() <= result.versions.items():
        return Found()
    return Found(dict(result.figures), dict(result.versions), dict(result.missing))


def check_commands() -> None:
    """Exit if Ingot's commands do not start, for example because a package is missing.

    Without these commands nothing can be compiled.
    """
    try:
        run_command([sys.executable, "-m", "ingot", "compile", "--help"], timeout=60)
    except ChildError as error:
        sys.exit(f"`python -m ingot` cannot be run: {error}")


def commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str | Path]]]:
    """Yield the name and the command line of each part of the benchmark, in the order of PARTS."""
    work = work_folder(options)
    artifact = work / "model.ingot"
    checkpoint = (options.checkpoints / model_name(options) if options.checkpoints else work) / "checkpoint"
    compiling = [HERE / "compile_time.py", checkpoint, "--work", work, f"--options={options.options}", "--measure"]
    site = ["--site", options.site] if options.site else []
    load = shlex.split(options.load)
    serving = ["--no-serve"] if "serve" in options.skip else load
    starts = [] if "cold_start" in asked_parts(options) else ["--one-start"]
    caches = ["--caches", options.peer_caches] if options.peer_caches else []
    drawn = ["--format", options.format] if options.format else []
    read = ["--load-format", "auto"] if options.format or options.shape in MIXTURES else []
    yield "checkpoint", [HERE / "random_checkpoint.py", options.shape, *drawn, checkpoint]
    yield "compile", [*compiling, "full"]
    yield "decode", [HERE / "decode.py", artifact, "--batch", options.batch]
    yield "cold_start", [HERE / "cold_start.py", artifact]
    yield "serve", [HERE / "serve.py", artifact, *load]
    asked = ["--peer", options.peer, "--batch", options.batch, "--timeout", str(options.seconds), *site, *starts]
    yield "peer", [HERE / "peer.py", checkpoint, *asked, *caches, *read, *serving]
    yield "compile_again", [*compiling, "cached,few"]


def run(part: str, command: list[str | Path], found: Found, seconds: float) -> None:
    """Run one part of the benchmark by its command line, for at most `seconds`.

    Its results are added to `found`. If it fails, the reason is added instead.
    """
    found.missing.pop(part, None)
    try:
        if seconds <= 0:
            raise ChildError("no time was left for it")
        if part == "checkpoint":
            if not (Path(command[-1]) / "config.json").exists():
                run_command([sys.executable, *command], timeout=seconds, echo=True)
            return
        answer = run_child(command, timeout=seconds, echo=True).value
        result = Result.model_validate_json(json.dumps(answer))
        found.figures |= result.figures
        found.versions |= result.versions
        found.missing |= result.missing
    except ChildError as error:
        found.missing[part] = str(error)


def write(options: argparse.Namespace, found: Found, folder: Path) -> Path:
    """Write the result of all parts that have run so far into `folder`. Return the path of the file."""
    settings = {"shape": options.shape, "batch": options.batch, "compile": options.options, "load": options.load}
    if options.format:
        settings["format"] = options.format
    return write_result(
        __file__,
        name_of(options),
        settings,
        found.figures | depth_ratio(found.figures),
        versions=found.versions,
        folder=folder,
        missing=found.missing,
    )


if __name__ == "__main__":
    main()
