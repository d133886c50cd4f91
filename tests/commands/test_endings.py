"""How commands end: faults of our own, interrupts, readers that go away, full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_world import Command, World

import ingot.cli.main as cli
from ingot.ir.errors import InternalError, PassError

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.one_in_file(3)]


def _caused() -> PassError:
    """A mistake in the code of one of Ingot's passes."""
    error = PassError("pass p: broke")
    error.__cause__ = LookupError("no node")
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InternalError("it broke", hint="nothing"), cli.OUR_FAULT, ("error: it broke", "please report it")),
        (
            _caused(),
            cli.OUR_FAULT,
            ("LookupError: no node", "error: pass p: broke", "please report it"),
        ),
        (ZeroDivisionError("one [over] zero"), cli.OUR_FAULT, ("Traceback", "[over]", "internal error", "report")),
        (KeyboardInterrupt(), cli.INTERRUPTED, ("interrupted",)),
    ],
)
def test_faults_of_our_own(
    ingot: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: tuple[str, ...]
) -> None:
    import ingot.ir.machine.target as module

    def fail(device: str = "auto") -> None:
        raise error

    monkeypatch.setattr(module.Target, "detect", staticmethod(fail))
    done = ingot("target")
    assert (done.code, done.out) == (code, "")
    assert all(word in done.err for word in words)


def test_a_reader_that_goes_away_is_no_error(world: World) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact), "--plan"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.NO_READER, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_stdout_is_told(world: World) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == cli.BAD_INPUT
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_a_stdout_without_unicode_still_works(world: World) -> None:
    command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "\\u2013" in done.stdout
