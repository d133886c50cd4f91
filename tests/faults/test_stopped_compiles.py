"""Compiles that are killed, interrupted, or raced by others.

Nothing is visible at the output, and the next compile starts clean.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compile_until
import pytest
from drawn import drawn, in_one_of
from tiny_compile import compile_tiny

from ingot.ir.errors import OutputError
from ingot.runtime.loading.artifact import open_artifact

pytestmark = [pytest.mark.xdist_group("stopped-compiles"), pytest.mark.one_in_file(3)]


class Running:
    """A compile in a process of its own, with a cache of its own, by which its processes are known."""

    def __init__(self, checkpoint: Path, output: Path, cache: Path, *, backend: str = "reference", stop: str = "-"):
        self.cache = cache
        command = [sys.executable, compile_until.__file__, str(checkpoint), str(output), backend, stop]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "INGOT_CACHE": str(cache)},
            start_new_session=True,
        )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        seen = []
        for found in self.process.stdout:
            seen.append(found.strip())
            if found.strip() == line:
                return
        raise AssertionError(f"no {line!r} in {seen}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Its last line."""
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        self.process.wait()
        return rest.strip().rpartition("\n")[2]

    def others(self) -> list[str]:
        """The command lines of processes that it started and that live."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) not in (self.process.pid, os.getpid()):
                with contextlib.suppress(OSError):
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and f"INGOT_CACHE={self.cache}".encode() in (folder / "environ").read_bytes():
                        found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        return found


@pytest.fixture
def start(single: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(**options: Any) -> Running:
        (tmp_path / "place").mkdir(exist_ok=True)
        running.append(Running(single, tmp_path / "place" / "a.ingot", tmp_path / "cache", **options))
        return running[-1]

    yield begin
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.communicate()


def until(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met)


@pytest.mark.parametrize("phase", drawn(1, ["trace", "weights", "write"]))
def test_after_kill_nine_nothing_is_visible_and_the_next_compile_starts_clean(
    single: Path, start: Callable[..., Running], tmp_path: Path, phase: str
) -> None:
    killed = start(stop="weights" if phase == "weights" else "-")
    killed.wait_for("there" if phase == "weights" else phase)
    if phase == "trace":
        time.sleep(0.2)  # in the middle of it
    killed.process.kill()
    killed.process.wait()
    place = tmp_path / "place"
    left = [path.name for path in place.iterdir()]
    if left == ["a.ingot"]:  # it came through before the signal
        assert phase == "write"
        return
    assert len(left) == 1 and left[0].startswith(".a.ingot.tmp-")
    compile_tiny(single, place / "a.ingot")
    assert [path.name for path in place.iterdir()] == ["a.ingot"]
    open_artifact(place / "a.ingot").verify_files()


def emitting(running: Running) -> bool:
    """A worker's C++ compiler runs."""
    return any("cc1plus" in command for command in running.others())


@pytest.mark.slow
def test_kill_nine_while_workers_emit(start: Callable[..., Running], tmp_path: Path) -> None:
    killed = start(backend="inductor")
    killed.wait_for("passes and executables")
    assert until(lambda: emitting(killed), 120)
    killed.process.kill()
    killed.process.wait()
    place = tmp_path / "place"
    assert not (place / "a.ingot").exists()
    # A worker ends with the region that it is at, which the next compile then finds in the cache. What the killed
    # process was at itself, the kernels, it leaves half-built.
    assert until(lambda: not killed.others(), 120), killed.others()
    restarted = start(backend="inductor")
    assert restarted.end() == "done"
    assert not [path for path in (tmp_path / "cache" / "build").iterdir() if path.is_dir()]
    assert [path.name for path in place.iterdir()] == ["a.ingot"]
    open_artifact(place / "a.ingot").verify_files()


@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_interrupt_leaves_nothing(start: Callable[..., Running], tmp_path: Path, backend: str) -> None:
    interrupted = start(backend=backend, stop="weights")
    if backend == "reference":
        interrupted.wait_for("there")
    else:
        interrupted.wait_for("passes and executables")
        assert until(lambda: emitting(interrupted), 120)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.process.wait(30) != 0
    assert list((tmp_path / "place").iterdir()) == []
    # At once, the C++ compiler too.
    assert until(lambda: not interrupted.others(), 10), interrupted.others()


@in_one_of(3)
def test_of_two_compiles_to_one_output_one_wins_and_the_other_is_told(
    single: Path, start: Callable[..., Running], tmp_path: Path
) -> None:
    """One in a process of its own and one here: both write weights when either may go on."""
    place, other = tmp_path / "place", start(stop="weights")
    other.wait_for("there")

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "weights" and done == 1:
            other.go_on()

    try:
        compile_tiny(single, place / "a.ingot", progress=progress)
    except OutputError as error:
        ends = [f"error: {error}"]
    else:
        ends = ["done"]
    ends.append(other.end())
    assert "done" in ends
    assert [path.name for path in place.iterdir()] == ["a.ingot"]
    open_artifact(place / "a.ingot").verify_files()
    (loser,) = (end for end in ends if end != "done")
    assert "remove it or choose another output" in loser
