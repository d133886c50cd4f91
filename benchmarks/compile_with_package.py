"""Measure how much longer `compile-model` takes where a package with a backend is installed.

    python benchmarks/compile_with_package.py CHECKPOINT --work FOLDER [--package docs/examples/my_backend] [--turns 3]

The compiles take turns, without the package and with it, each with empty caches. The figures are the least wall and
CPU seconds of each. CPU seconds are of all processes that a compile starts, and vary less on a shared machine. The
number of calls that the package's backends won is a figure too: a backend that wins changes what is compiled.
`--options="--max-batch 4"` passes options to compile-model. Nothing is downloaded: setuptools and Ingot are installed.
"""

import argparse
import json
import resource
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compile_time import CACHES
from results import ROOT, Figure, add_json_option, report

from ingot.backends.table import BACKENDS
from ingot.bench.children import ChildError, run_command

WITHOUT, WITH = "compile", "compile_with_package"


@dataclass(frozen=True)
class Compiled:
    """One compile: its wall and CPU seconds, and the number of calls of backends of other packages."""

    wall: float
    cpu: float
    outside: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder for caches, artifacts and the package")
    parser.add_argument("--package", type=Path, default=ROOT / "docs" / "examples" / "my_backend")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="timeout of a compile, in seconds")
    parser.add_argument("--options", default="", help="options of compile-model, as one string")
    add_json_option(parser)
    options = parser.parse_args()
    if options.turns < 1:
        sys.exit(f"--turns is {options.turns}, and at least 1 is needed")
    extra = shlex.split(options.options)
    try:
        site = installed(options.package, options.work)
        turns = [
            {
                name: compiled(options.checkpoint, options.work, folder, extra, options.timeout)
                for name, folder in ((WITHOUT, None), (WITH, site))
            }
            for _ in range(options.turns)
        ]
    except ChildError as error:
        sys.exit(f"it failed: {error}")
    settings = {"checkpoint": options.checkpoint.name, "package": options.package.name, "options": options.options}
    report(
        __file__,
        options.json,
        settings,
        figures([one[WITHOUT] for one in turns], [one[WITH] for one in turns]),
    )


def installed(package: Path, work: Path) -> Path:
    """Install the package in the folder `package` into a folder of its own, and return that folder."""
    site, source = work / "site", work / "source"
    for folder in (site, source):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, source)  # building writes into the folder of the source
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run_command([sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", site, source])
    return site


def compiled(checkpoint: Path, work: Path, site: Path | None, extra: Sequence[str], timeout: float) -> Compiled:
    """Compile with empty caches. `site` is the folder with the package, or None for a compile without it."""
    output, cache = work / "model.ingot", work / "cache"
    for folder in (output, cache):
        shutil.rmtree(folder, ignore_errors=True)
    env = {name: str(cache / name.lower()) for name in CACHES} | ({"PYTHONPATH": str(site)} if site else {})
    command: list[str | Path] = [sys.executable, "-m", "ingot", "compile", checkpoint, "--output", output, *extra]
    before = _cpu_seconds()
    ended = run_command(command, env=env, timeout=timeout)
    programs = json.loads((output / "choices.json").read_text(encoding="utf-8")).values()
    chosen = [backend for program in programs for backend in program["backends"].values()]
    return Compiled(ended.seconds, _cpu_seconds() - before, sum(name not in BACKENDS for name in chosen))


def _cpu_seconds() -> float:
    """Return the CPU seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(without: Sequence[Compiled], packaged: Sequence[Compiled]) -> dict[str, Figure]:
    """Return the figures of compiles without the package and with it, by name."""
    found: dict[str, Figure] = {}
    for clock in ("wall", "cpu"):
        least = []
        for name, some in ((WITHOUT, without), (WITH, packaged)):
            values = tuple(getattr(one, clock) for one in some)
            where = "with the package" if name == WITH else "without the package"
            found[f"{name}_{clock}"] = Figure(
                value=min(values), unit="s", what=f"{clock} seconds of compile-model {where}", values=values
            )
            least.append(min(values))
        found[f"{clock}_ratio"] = Figure(
            value=least[1] / least[0], unit="", what=f"{clock} seconds with the package over those without"
        )
    found["won"] = Figure(
        value=max(one.outside for one in packaged), unit="", what="calls and regions of the package's backends"
    )
    return found


if __name__ == "__main__":
    main()
