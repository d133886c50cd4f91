"""Processes that are measured: started with a clock, read while they run, ended with all that they started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAST_LINES = 40  # of what a child printed: where a traceback's error stands
_GRACE_SECONDS = 5.0  # for a child to end its own children
_ERROR = ("Error", "error:", "Exception")


class ChildError(Exception):
    """A child ended badly; the message says how, in a line."""


@dataclass(frozen=True)
class Ended:
    """A child that ended well: the time.time() at which it was started, the seconds that it took, its JSON value."""

    started: float
    seconds: float
    value: Any


def run_child(
    script: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 600.0, echo: bool = False
) -> Ended:
    """Run a Python script that writes a JSON value to the FILE of its last option, `--json FILE`; its value.

    `env` is added to this process's environment. With `echo` its output is passed on while it runs, else
    the last of it when it fails. Raises ChildError
    when it fails, writes nothing or takes more than `timeout` seconds; it and its children are then gone.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-child-") as folder:
        answer = Path(folder) / "answer.json"
        ended = run_command([sys.executable, *script, "--json", answer], env=env, timeout=timeout, echo=echo)
        try:
            return Ended(ended.started, ended.seconds, json.loads(answer.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ChildError(f"it ended well and left no answer: {error}") from None


def run_command(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    echo: bool = False,
) -> Ended:
    """`run_child` of any command, which has no value."""
    started, begin = time.time(), time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be ended with it
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _end(process)

    timer = threading.Timer(timeout, expire)
    timer.start()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        with _ending_when_terminated():
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                if echo:
                    print(line, end="", flush=True)
            status = process.wait()
            seconds = time.perf_counter() - begin
    finally:
        timer.cancel()
        _end(process)
    if (expired.is_set() or status) and not echo:
        print("\n".join(last), file=sys.stderr)
    if expired.is_set():
        raise ChildError(f"it was ended after {timeout:g} s")
    if status:
        raise ChildError(f"it ended with status {status}: {_reason(last)}")
    return Ended(started, seconds, None)


@contextlib.contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """SIGTERM raises SystemExit: a child that is ended so ends its own children, which have a session of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the child if it runs still, and whatever it left behind."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, number)


def _reason(lines: Sequence[str]) -> str:
    """The last line that names an error, else the last one."""
    told = [line for line in lines if line.strip()]
    return next((line for line in reversed(told) if any(word in line for word in _ERROR)), told[-1] if told else "")
