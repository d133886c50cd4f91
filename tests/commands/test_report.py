"""`ingot report`: it writes a page or says why not, and leaves nothing else behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ingot.cli.main as cli
from ingot.report.start_up import measure_start_up

pytestmark = [pytest.mark.xdist_group("report-command"), pytest.mark.one_in_file(3)]


@pytest.fixture
def model(artifact: Callable[..., Path]) -> Path:
    return artifact("llama-plain", backend="reference")


def test_it_writes_one_page(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    page.write_text("what stood there before")
    assert cli.run(cli.INGOT, ["report", str(model), "-o", str(page)]) == cli.DONE
    assert page.read_text().startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert f"Wrote {page} (" in capsys.readouterr().out
    umask = os.umask(0)
    os.umask(umask)
    assert page.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("report.pdf", "is not the name of a page"),
        ("missing/report.html", "cannot be written"),
        (".", "is not the name of a page"),
    ],
)
def test_a_bad_output_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, says: str
) -> None:
    assert cli.run(cli.INGOT, ["report", str(model), "-o", str(tmp_path / output)]) == cli.BAD_INPUT
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_page_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    assert cli.run(cli.INGOT, ["report", str(model), "-o", str(tmp_path / "report.html")]) == cli.BAD_INPUT
    assert "cannot be written" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_what_is_no_artifact_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert cli.run(cli.INGOT, ["report", str(tmp_path / "none"), "-o", str(page)]) == cli.BAD_INPUT
    assert "not there" in capsys.readouterr().err and not page.exists()


def test_an_artifact_without_programs_is_refused(
    artifact: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = artifact("llama-plain", backend="reference", trace="summary")
    assert cli.run(cli.INGOT, ["report", str(summary), "-o", str(tmp_path / "report.html")]) == cli.BAD_INPUT
    assert "--trace full" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_help_imports_nothing_slow() -> None:
    script = (
        "import sys, ingot.cli.main as cli\n"
        "assert cli.run(cli.INGOT, ['report', '--help']) == 0\n"
        "print(*({'torch', 'pydantic', 'ingot.report'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "\n") and "--start-up" in done.stdout


def test_it_needs_no_compiler(model: Path, tmp_path: Path) -> None:
    script = (
        "import json, sys, torch; before = set(sys.modules)\n"
        "import ingot.cli.main as cli\n"
        f"assert cli.run(cli.INGOT, ['report', {str(model)!r}, '-o', {str(tmp_path / 'report.html')!r}]) == 0\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    # Of backends, what reads their files may be there.
    compilers = (
        r"torch\._dynamo|torch\._inductor|triton|ingot\.(passes|frontend|backends\..*(emit|compile|kernels|call))\b"
    )
    assert [name for name in loaded if re.match(compilers, name)] == []


def test_start_up_is_measured_down_to_a_token(model: Path) -> None:
    parts = measure_start_up(model)
    assert list(parts) == ["Python", "imports", "artifact: checked and loaded", "first token"]
    assert all(0 < seconds < 300 for seconds in parts.values())


def test_an_artifact_that_does_not_start_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # stands for a machine that cannot run it
    arguments = ["report", str(model), "-o", str(tmp_path / "report.html")]
    assert cli.run(cli.INGOT, [*arguments, "--start-up"]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert "does not start on this machine" in said and "without --start-up" in said
    assert list(tmp_path.iterdir()) == []
    assert cli.run(cli.INGOT, arguments) == cli.DONE
