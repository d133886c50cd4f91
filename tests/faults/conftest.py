"""Artifacts to be damaged, and a small checkpoint to compile."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import TINY


@pytest.fixture
def plain(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact of the reference backend, to be damaged."""
    return Path(shutil.copytree(artifact("llama-plain", backend="reference"), tmp_path / "plain.ingot"))


@pytest.fixture
def compiled(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact with executables, to be damaged."""
    return Path(shutil.copytree(artifact("llama-biased", backend="inductor"), tmp_path / "compiled.ingot"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer: its regions are few."""
    return TINY["llama-plain"].write(tmp_path_factory.mktemp("single") / "checkpoint", num_hidden_layers=1)
