"""The assembler of Triton's kernels is one that makes right code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.backends import ptxas
from ingot.backends.triton.emit import Triton
from ingot.ir.errors import TargetError

Install = Callable[[Path, str], Path]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Writes an assembler that prints a version. Triton's package has none but those of the test."""

    def write(path: Path, version: str) -> Path:
        path.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n", encoding="utf-8"
        )
        path.chmod(0o755)
        return path

    monkeypatch.setattr(ptxas, "_folder", lambda: tmp_path)
    monkeypatch.setattr(ptxas, "_found", ptxas._found.__wrapped__)  # uncached
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that it is restored, also where it was unset
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    return write


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [("12.8.93", "12.9.86", "ptxas-blackwell"), ("12.9.86", "13.3.33", "ptxas"), ("13.0.88", None, "ptxas")],
)
def test_the_first_sound_one_of_tritons_package(
    first: str, second: str | None, taken: str, install: Install, tmp_path: Path
) -> None:
    install(tmp_path / "ptxas", first)
    if second is not None:
        install(tmp_path / "ptxas-blackwell", second)
    ptxas.use_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == str(tmp_path / taken)
    assert Triton().toolchain()["ptxas"] == ptxas.ptxas_version() == (second if taken == "ptxas-blackwell" else first)


def test_one_that_is_named_takes_precedence(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "ptxas", "12.9.86")
    mine = install(tmp_path / "mine", "13.1.2")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(mine))
    ptxas.use_ptxas()
    assert (os.environ["TRITON_PTXAS_PATH"], ptxas.ptxas_version()) == (str(mine), "13.1.2")


def test_without_a_sound_one_the_error_says_what_was_found(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = install(tmp_path / "ptxas", "12.8.93")
    with pytest.raises(TargetError, match="no ptxas was found") as error:
        ptxas.use_ptxas()
    assert error.value.expected == f"ptxas 12.9 or newer; found 12.8.93 ({old})"
    assert "TRITON_PTXAS_PATH" not in os.environ and ptxas.ptxas_version() == "none"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "missing"))
    with pytest.raises(TargetError, match="TRITON_PTXAS_PATH") as error:
        ptxas.use_ptxas()
    assert error.value.expected == "ptxas 12.9 or newer; found none"


def test_the_installed_triton_has_one() -> None:
    version = ptxas.ptxas_version()
    assert tuple(map(int, version.split("."))) >= (12, 9)
