"""Measure how fast the part for one GPU of a fat artifact decodes, against an artifact for that GPU alone.

    python benchmarks/fat_artifact.py CHECKPOINT --work FOLDER [--targets cpu,sm_80,sm_90,sm_100] [--batch 1,32]

Three artifacts are compiled for this machine's GPU, unless FOLDER has them already:

single   for this GPU alone, with --tune: tile sizes and backends are timed here
fat      for all --targets, without a GPU in sight, from the tuning log of `single`
untuned  for this GPU alone, without a GPU in sight and without a log

decode.py then measures them in turns, each in processes of its own. The time of a step is the minimum of the turns. The
sizes of `single` and `fat` on the disk are figures too, with executables and without them.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import Figure, Result, add_json_option, report

from ingot.bench.children import ChildError, run_child, run_command

HERE = Path(__file__).parent
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Compiled:
    """One artifact to measure: the options of compile-model, and the environment that it needs."""

    what: str
    options: tuple[str, ...]
    env: Mapping[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the artifacts")
    parser.add_argument("--gpu", default="sm_90", help="the target that is this machine's GPU")
    parser.add_argument("--targets", default="cpu,sm_80,sm_90,sm_100", help="the targets of the fat artifact")
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="timeout of each compile and measurement, in s")
    parser.add_argument(
        "--options",
        default="--max-seq-len 1024 --max-batch 32 --max-tokens 2048",
        help="options of each compile-model, as one string",
    )
    add_json_option(parser)
    options = parser.parse_args()
    if options.gpu not in options.targets.split(","):
        sys.exit(f"--targets {options.targets} lacks --gpu {options.gpu}")
    if options.turns < 1:
        sys.exit(f"--turns is {options.turns}, and at least 1 is needed")
    ways = artifacts(options)
    try:
        for name, one in ways.items():
            compile_unless_there(options, folder(options.work, name), one)
        turns = [
            {name: decoded(folder(options.work, name), options.batch, options.timeout) for name in ways}
            for _ in range(options.turns)
        ]
    except ChildError as error:
        sys.exit(f"it failed: {error}")
    settings = {name: getattr(options, name) for name in ("gpu", "targets", "batch", "turns", "options")}
    found = speeds(ways, turns, [int(batch) for batch in options.batch.split(",")])
    report(__file__, options.json, {"checkpoint": options.checkpoint.name, **settings}, found | sizes(options.work))


def folder(work: Path, name: str) -> Path:
    return work / f"{name}.ingot"


def artifacts(options: argparse.Namespace) -> dict[str, Compiled]:
    """Return what to compile, by name. `single` is first, because `fat` reads its tuning log."""
    single, log = f"{options.gpu} alone, timed here", str(folder(options.work, "single"))
    return {
        "single": Compiled(single, ("--target", options.gpu, "--tune"), {}),
        "fat": Compiled(f"{options.targets}, with its log", ("--target", options.targets, "--tuning-log", log), NO_GPU),
        "untuned": Compiled(f"{options.gpu} alone, without a log", ("--target", options.gpu), NO_GPU),
    }


def compile_unless_there(options: argparse.Namespace, output: Path, one: Compiled) -> None:
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ingot", "compile", options.checkpoint, "--output", output, *one.options]
        ended = run_command([*command, *shlex.split(options.options)], env=one.env, timeout=options.timeout, echo=True)
        print(f"== {output.name}: {ended.seconds:.1f} s", flush=True)


def decoded(artifact: Path, batch: str, timeout: float) -> Result:
    command: list[str | Path] = [HERE / "decode.py", artifact, "--batch", batch]
    answer = run_child(command, timeout=timeout, echo=True).value
    return Result.model_validate_json(json.dumps(answer))


def speeds(
    ways: Mapping[str, Compiled], turns: Sequence[Mapping[str, Result]], batches: Sequence[int]
) -> dict[str, Figure]:
    """Return the seconds of a step of each artifact and batch, and the ratios to those of `single`."""
    found: dict[str, Figure] = {}
    for batch in batches:
        for name, one in ways.items():
            values = tuple(turn[name].figures[f"batch_{batch}_step"].value for turn in turns)
            found[f"{name}_batch_{batch}"] = Figure(
                value=min(values), unit="s", what=f"a step of {batch}, {one.what}", values=values
            )
        for name in ("fat", "untuned"):
            ratio = found[f"{name}_batch_{batch}"].value / found[f"single_batch_{batch}"].value
            found[f"{name}_batch_{batch}_ratio"] = Figure(
                value=ratio, unit="", what=f"{name} over single, a step of {batch}"
            )
    return found


def sizes(work: Path) -> dict[str, Figure]:
    """Return the bytes of `single` and `fat` on the disk, and of their weights alone."""
    found: dict[str, Figure] = {}
    for name in ("single", "fat"):
        files = [path for path in folder(work, name).rglob("*") if path.is_file() and not path.is_symlink()]
        all_bytes = sum(path.stat().st_size for path in files)
        weights = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
        found[f"{name}_size"] = Figure(value=all_bytes, unit="B", what=f"{name} on the disk")
        found[f"{name}_weights"] = Figure(value=weights, unit="B", what="of it: weights")
    return found


if __name__ == "__main__":
    main()
