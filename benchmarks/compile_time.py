"""Measure the seconds of `compile-model`, by the state of its caches and by depth.

    python benchmarks/compile_time.py CHECKPOINT --work FOLDER [--measure full,cached,few] [--layers 4] [--json FILE]

full     the checkpoint, with empty caches, into FOLDER/model.ingot, which is kept
cached   the same again, with the caches that `full` filled: as with new weights of a known shape
few      a checkpoint of the same shape with random weights and few layers, with empty caches
Each is a process of its own, from its start to its end. Its memory is the peak of the anonymous memory of the process
and of all that it starts, and of the largest of these alone. `--options="--max-seq-len 4096"` passes options to
compile-model.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from process_samples import children_memory
from random_checkpoint import with_layers, write_checkpoint
from results import Figure, add_json_option, report

from ingot.bench.children import ChildError, run_command

WAYS = ("full", "cached", "few")
# The caches of Ingot, and of the compilers that it calls.
CACHES = ("INGOT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder for caches and artifacts")
    parser.add_argument("--measure", default=",".join(WAYS), help="ways to measure, separated by commas")
    parser.add_argument("--layers", type=int, default=4, help="layers of `few`")
    parser.add_argument("--timeout", type=float, default=600.0, help="timeout of a compile, in seconds")
    parser.add_argument("--options", default="", help="options of compile-model, as one string")
    add_json_option(parser)
    options = parser.parse_args()
    asked = options.measure.split(",")
    if unknown := set(asked) - set(WAYS):
        sys.exit(f"--measure knows no {', '.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    if "cached" in asked and "full" not in asked and not (options.work / "cache").is_dir():
        sys.exit("there are no caches for `cached`: measure `full` in the same --work first")
    found: dict[str, Figure] = {}
    for way in WAYS:
        if way in asked:
            try:
                found |= measure(way, options)
            except ChildError as error:
                sys.exit(f"the compile '{way}' failed: {error}")
    found |= depth_ratio(found)
    settings = {"checkpoint": options.checkpoint.name, "few_layers": options.layers}
    report(__file__, options.json, {**settings, "options": options.options}, found)


def depth_ratio(found: Mapping[str, Figure]) -> dict[str, Figure]:
    """Return how many times longer it takes to compile all layers than a few layers.

    `found` has the measured figures by name. The result is one figure by name. It is empty if `found` lacks one of the
    two times.
    """
    if "compile" not in found or "compile_few" not in found:
        return {}
    ratio = found["compile"].value / found["compile_few"].value
    return {"compile_per_few": Figure(value=ratio, unit="", what="all layers over few")}


def measure(way: str, options: argparse.Namespace) -> dict[str, Figure]:
    """Compile once and return the measured figures by name.

    `way` is "full" for empty caches, "cached" for filled caches, or "few" for a model of few layers. Raises ChildError
    if the compile fails.
    """
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    extra, timeout = shlex.split(options.options), options.timeout
    if way == "full":
        _remove(work / "cache", work / "model.ingot")
        return _compile(
            options.checkpoint, work / "model.ingot", work / "cache", extra, timeout, "compile", "all layers"
        )
    try:
        if way == "cached":
            output, what = work / "again.ingot", "all layers, executables from the cache"
            return _compile(options.checkpoint, output, work / "cache", extra, timeout, "compile_cached", what)
        config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
        few = write_checkpoint(work / "few", with_layers(config, options.layers))
        what = f"{options.layers} layers"
        return _compile(few, work / "few.ingot", work / "few-cache", extra, timeout, "compile_few", what)
    finally:
        _remove(work / "again.ingot", work / "few", work / "few.ingot", work / "few-cache")


def _compile(
    checkpoint: Path, output: Path, cache: Path, extra: Sequence[str], timeout: float, name: str, what: str
) -> dict[str, Figure]:
    command: list[str | Path] = [sys.executable, "-m", "ingot", "compile", checkpoint, "--output", output, *extra]
    caches = {name: str(cache / name.lower()) for name in CACHES}
    with children_memory() as memory:
        ended = run_command(command, env=caches, timeout=timeout, echo=True)
    phases = json.loads((output / "timings.json").read_text(encoding="utf-8"))["phases"]
    return {
        name: Figure(value=ended.seconds, unit="s", what=f"compile-model, {what}"),
        f"{name}_memory": Figure(value=memory.together, unit="B", what="anonymous memory of all its processes, peak"),
        f"{name}_memory_process": Figure(value=memory.largest, unit="B", what="of one process, peak"),
        **{
            f"{name}_{phase.replace(' ', '_')}": Figure(value=seconds, unit="s", what=f"of it: {phase}")
            for phase, seconds in phases.items()
        },
    }


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
