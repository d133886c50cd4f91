"""Artifacts to be damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def plain(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact of the reference backend, to be damaged."""
    return Path(shutil.copytree(artifact("llama-plain", backend="reference"), tmp_path / "plain.ingot"))


@pytest.fixture
def compiled(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact with executables, to be damaged."""
    return Path(shutil.copytree(artifact("llama-biased", backend="inductor"), tmp_path / "compiled.ingot"))
