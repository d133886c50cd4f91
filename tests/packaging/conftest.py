"""The package as it is installed from a clean copy of the tracked files: made once for all tests of it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from ended_well import ROOT, run


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The files of a fresh clone, and those that would be in it once added."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in sorted(set(listed.split("\0")) - {""}) if os.path.lexists(ROOT / name)]


@pytest.fixture(scope="session")
def checkout(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the tracked files, links kept as links."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def wheel(checkout: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "wheels", ".", cwd=checkout)
    (built,) = (checkout / "wheels").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")
    run(*pip, "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"
