"""What is installed: the tracked files of the rooms under `ingot/`, once, from a wheel or from an sdist."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
from drawn import in_one_of
from ended_well import ROOT, run

ROOMS = ("ir", "models", "frontend", "passes", "backends", "runtime")

pytestmark = pytest.mark.xdist_group("packaging")


def packaged(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def test_the_links_are_relative_links_to_the_rooms() -> None:
    assert {room: os.readlink(ROOT / "ingot" / room) for room in ROOMS} == {room: f"../{room}" for room in ROOMS}


def test_the_wheel_holds_the_tracked_files_of_the_rooms_once(tracked: list[str], wheel: Path) -> None:
    of_rooms = [f"ingot/{name}" for name in tracked if name.split("/")[0] in ROOMS]
    of_front_door = [name for name in tracked if name.startswith("ingot/") and name.split("/")[1] not in ROOMS]
    assert packaged(wheel) == sorted(of_rooms + of_front_door), (
        "a kind of file that does not ship yet is added to [tool.setuptools.package-data] in pyproject.toml"
    )


@in_one_of(3)
def test_the_sdist_builds_the_same_wheel(checkout: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "from-sdist", ".", cwd=checkout)
    (rebuilt,) = (checkout / "from-sdist").glob("*.whl")
    assert packaged(rebuilt) == packaged(wheel)


IMPORT_INSTALLED = """
import importlib, importlib.metadata, sys
import ingot
for room in sys.argv[1:]:
    print(importlib.import_module(f"ingot.{room}").__file__)
(installed,) = importlib.metadata.distributions(name="ingot", path=[ingot.__path__[0] + "/.."])
for script in installed.entry_points.select(group="console_scripts"):
    script.load()
"""


def test_the_wheel_installs_and_imports_from_elsewhere(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    printed = run(sys.executable, "-c", IMPORT_INSTALLED, *ROOMS, cwd=tmp_path, env=environment)
    assert printed.split() == [str(site / "ingot" / room / "__init__.py") for room in ROOMS]
    assert {"compile-model", "ingot"} <= {path.name for path in (site / "bin").iterdir()}
