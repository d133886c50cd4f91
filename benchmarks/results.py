"""Write and read the result files of benchmarks, benchmarks/results/NAME.json.

A benchmark is a script in this folder: it measures, then calls `write_result`. Times are minima of repeated runs unless
a figure says otherwise, because other work on a machine only adds to them.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from units import quantity

from ingot.bench.machine import PACKAGES, Machine, package_versions, this_machine
from ingot.ir.json_text import dump_json

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
REVISION = "INGOT_REVISION"  # the environment variable that names the commit of a copy that is no git checkout
_NAME = r"^[a-z0-9_]+$"
_SCRIPT = r"^(kernels/)?[a-z0-9_]+\.py$"
_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class Figure(BaseModel):
    """One measured number of a benchmark's result. `what` describes what was measured.

    `unit` is "s", "B", "B/s", "flop", "flop/s", "tokens/s", "requests/s", or "" for a ratio or count. `values` has the
    number of each try if `value` comes from several tries. It is empty if they were not kept.
    """

    model_config = _FROZEN
    value: float
    unit: str
    what: str
    values: tuple[float, ...] = ()

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")


class Result(BaseModel):
    """The result of one run of a benchmark, as stored in a JSON file.

    name       the name of the file, without ".json"
    script     the benchmark that wrote it, by its path in benchmarks/
    revision   the commit, with "+" if files differed from it
    date       the day, in UTC
    machine    the machine that was measured
    versions   the versions of packages, by name
    settings   the options of the benchmark
    figures    the measured numbers, by name
    missing    for each figure or part that was not measured, the reason
    """

    model_config = _FROZEN
    name: str = Field(pattern=_NAME)
    script: str = Field(pattern=_SCRIPT)
    revision: str
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, str | int | float | bool | None]
    figures: dict[str, Figure]
    missing: dict[str, str] = {}


def gpu_result(shape: str, format: str | None = None) -> str:
    """Return the default name of gpu.py's result for a model shape, such as "gpu_8b" for "8b".

    `format` is that of quantized linears, as in "gpu_8b_fp8".
    """
    return "_".join(filter(None, ("gpu", shape.replace("-", "_").replace(".", "_"), format)))


def write_result(
    script: str,
    name: str,
    settings: Mapping[str, str | int | float | bool | None],
    figures: Mapping[str, Figure],
    *,
    packages: Sequence[str] = PACKAGES,
    versions: Mapping[str, str] | None = None,
    folder: Path = RESULTS,
    missing: Mapping[str, str] | None = None,
) -> Path:
    """Write NAME.json into `folder` and return its path. The result of an earlier run is replaced.

    script     the `__file__` of the benchmark
    settings   the options of the benchmark
    figures    the measured numbers, by name
    packages   packages that affect the figures; their versions are recorded, or that they are not installed
    versions   versions of software that this process cannot import, by name
    missing    for each figure that was not measured, the reason
    """
    result = Result(
        name=name,
        script=Path(script).resolve().relative_to(RESULTS.parent.resolve()).as_posix(),
        revision=revision(),
        date=datetime.now(UTC).date().isoformat(),
        machine=this_machine(),
        versions={**package_versions(packages), **(versions or {})},
        settings=dict(settings),
        figures=dict(figures),
        missing=dict(missing or {}),
    )
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(dump_json(result.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
    return path


def read_result(path: Path) -> Result:
    """Read a file that `write_result` wrote. Raises pydantic.ValidationError if the file breaks the schema."""
    return Result.model_validate_json(path.read_text(encoding="utf-8"))


def print_figures(figures: Mapping[str, Figure]) -> None:
    """Print one line for each figure: its name, value and description."""
    width = max(map(len, figures), default=0)
    for name, figure in figures.items():
        print(f"{name:{width}}  {quantity(figure.value, figure.unit):14}  {figure.what}")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --json FILE.json to a benchmark's parser.

    `report` writes the result to this file. Without the option, no file is written.
    """
    parser.add_argument("--json", type=_json_file, metavar="FILE", help="where to write the result, NAME.json")


def report(
    script: str,
    json: Path | None,
    settings: Mapping[str, str | int | float | bool | None],
    figures: Mapping[str, Figure],
) -> None:
    """Print the figures. Write the result of the benchmark with the `__file__` `script` to the file `json`, if there is
    one."""
    print_figures(figures)
    if json is not None:
        folder = json.parent
        print(write_result(script, json.stem, settings, figures, folder=folder))


def revision() -> str:
    """Return the commit of the measured code, with "+" if files differ from it.

    The environment variable INGOT_REVISION takes precedence over git. Exits if neither names a commit.
    """
    if named := os.environ.get(REVISION):
        return named

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"{ROOT} is no git checkout: a result needs its commit, so set {REVISION}=COMMIT")


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or not re.match(_NAME, path.stem):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME.json, with a name of a-z, 0-9 and _")
    return path
