"""Run and time child processes, read the JSON that they write, and end them together with their own children."""

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

_LAST_LINES = 40  # of a child's output: enough to include a traceback's error
_GRACE_SECONDS = 5.0  # time for a child to end its own children
_ERROR = ("Error", "error:", "Exception")


class ChildError(Exception):
    """A child process failed. The message says how, in one line."""


@dataclass(frozen=True)
class Ended:
    """The result of a child process that succeeded.

    `started` is the value of time.time() at its start, and `seconds` its duration. `value` is the JSON value that it
    wrote, or None.
    """

    started: float
    seconds: float
    value: Any


def run_child(
    script: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 600.0, echo: bool = False
) -> Ended:
    """Run a Python script in a child process, and return its times and the JSON value that it wrote.

    `script` is the script's path, or "-m" and a module, followed by arguments. This function adds the option `--json
    FILE`, and the script must write its JSON value to FILE. `env` extends this process's environment. With `echo`, the
    child's output is printed while it runs. Without `echo`, its last lines are printed if it fails.

    Raises ChildError if the child fails, writes no value, or takes more than `timeout` seconds. The child and all
    processes that it started have then ended.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-child-") as folder:
        answer = Path(folder) / "answer.json"
        ended = run_command([sys.executable, *script, "--json", answer], env=env, timeout=timeout, echo=echo)
        try:
            return Ended(ended.started, ended.seconds, json.loads(answer.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ChildError(f"it succeeded but wrote no answer: {error}") from None


def run_command(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    echo: bool = False,
) -> Ended:
    """Run a command in a child process, and return its times. `value` of the result is None.

    `env` extends this process's environment. With `echo`, the command's output is printed while it runs. Without
    `echo`, its last lines are printed if it fails. Raises ChildError if it fails or takes more than `timeout` seconds.
    """
    started, begin = time.time(), time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its children can be ended with it
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
        raise ChildError(f"it was ended after {in_seconds(timeout)}")
    if status:
        raise ChildError(f"it ended with status {status}: {_reason(last)}")
    return Ended(started, seconds, None)


def in_seconds(limit: float) -> str:
    """Return a time limit as text, with at most one decimal. Limits may be what is left of another: 89.9959 is 90 s."""
    return f"{round(limit, 1):g} s"


@contextlib.contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the block, so that this process ends its child before it exits.

    Signals to this process do not reach the child, which runs in a session of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the child process if it still runs, and the processes that it started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have already ended
        os.killpg(process.pid, number)


def _reason(lines: Sequence[str]) -> str:
    """Return the line that explains why a process failed: the last line of its output with an error.

    If no line has an error, it is the last line.
    """
    printed = [line for line in lines if line.strip()]
    errors = [line for line in printed if any(word in line for word in _ERROR)]
    return (errors or printed or [""])[-1]
