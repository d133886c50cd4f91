"""Figures say which packages were there."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from installed import describe

from ingot.bench.machine import NOT_INSTALLED, PACKAGES, package_versions


def test_a_package_that_is_not_there_is_named_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    python = {"python": platform.python_version()}
    assert package_versions() == {**python, **dict.fromkeys(PACKAGES, NOT_INSTALLED)}
    describe(tmp_path, "flashinfer-python", "0.6.13")
    assert package_versions(["flashinfer-python"]) == {**python, "flashinfer-python": "0.6.13"}
