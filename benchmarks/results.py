"""The one form in which benchmarks leave what they measured: benchmarks/results/NAME.json.

A benchmark is a script in this folder: it measures, then calls `write_result`. Times are minima of repeated runs unless
a figure says otherwise, because other work on a machine only ever adds to them.
"""

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ingot.ir.json_text import dump_json
from ingot.ir.target import Target

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class Machine(BaseModel):
    """Where it was measured. `cores` are those that the process might use, `memory` is in bytes; `load` is the load
    average of the minute before, which tells whether the machine was at work on something else."""

    model_config = _FROZEN
    processor: str
    features: tuple[str, ...]
    cores: int
    memory: int
    system: str
    load: float


class Figure(BaseModel):
    """One number. `unit` is "s", "B", "B/s", "tokens/s" or "" for a ratio; `what` says in words what was measured."""

    model_config = _FROZEN
    value: float
    unit: str
    what: str


class Result(BaseModel):
    """What one run of a benchmark found.

    `name` names the file; `revision` is the commit, with "+" when files differed from it. `settings` are what the
    benchmark was asked for, `figures` the numbers by name.
    """

    model_config = _FROZEN
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    revision: str
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, str | int | float | bool | None]
    figures: dict[str, Figure]


def write_result(
    name: str,
    settings: Mapping[str, str | int | float | bool | None],
    figures: Mapping[str, Figure],
    *,
    packages: Sequence[str] = ("torch",),
    folder: Path = RESULTS,
) -> Path:
    """Write NAME.json over an earlier run's; `packages` are those whose versions bear on the figures. Returns it."""
    result = Result(
        name=name,
        revision=_revision(),
        machine=_machine(),
        versions={"python": platform.python_version(), **{package: version(package) for package in packages}},
        settings=dict(settings),
        figures=dict(figures),
    )
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(dump_json(result.model_dump(mode="json")), encoding="utf-8")
    return path


def read_result(path: Path) -> Result:
    """A result that `write_result` wrote. Raises pydantic.ValidationError for a file that breaks the schema."""
    return Result.model_validate_json(path.read_text(encoding="utf-8"))


def _revision() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _machine() -> Machine:
    target = Target.detect("cpu")
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return Machine(
        processor=found[1] if found else platform.processor() or target.arch,
        features=target.features,
        cores=target.cores,
        memory=target.memory,
        system=f"{platform.system()} {platform.machine()}",
        load=round(os.getloadavg()[0], 2),
    )
