"""What benchmarks run in processes of their own: the answer, the reason of a failure, and the end of what hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from child_script import script_of
from http_server import until

from ingot.bench import children


def test_a_child_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(
        tmp_path, "print('seen')\njson.dump([os.environ['GIVEN'], time.time()], open(sys.argv[-1], 'w'))"
    )
    ended = children.run_child([script], env={"GIVEN": "7"}, echo=True)
    given, ran_at = ended.value
    assert given == "7" and ended.started <= ran_at <= ended.started + ended.seconds
    assert capsys.readouterr().out == "seen\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('no such thing')", "status 1: ValueError: no such thing"),
        ("sys.exit('plainly not')", "status 1: plainly not"),
        ("pass", "wrote no answer"),
    ],
)
def test_a_child_that_fails_says_why(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(children.ChildError, match=reason):
        children.run_child([script_of(tmp_path, text)])


def test_a_child_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child runs a child in a session of its own, as benchmarks do that gpu.py runs. The time is over once both
    run, however long a busy machine takes to start them."""
    inner, running = tmp_path / "inner.py", tmp_path / "pid"
    inner.write_text(
        f"import os, time\nopen({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.replace({str(tmp_path / 'part')!r}, {str(running)!r})\ntime.sleep(600)"
    )
    text = "from ingot.bench.children import run_command\n"

    class Timer(threading.Thread):
        """Calls `expire` when the inner child runs, and not before."""

        def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
            super().__init__(daemon=True)
            assert seconds == 2.5
            self._expire = expire

        def run(self) -> None:
            until(running.exists, 60)
            self._expire()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(children.threading, "Timer", Timer)
    with pytest.raises(children.ChildError, match=r"ended after 2\.5 s"):
        children.run_child([script_of(tmp_path, text + f"run_command([sys.executable, {str(inner)!r}])")], timeout=2.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(running.read_text()), 0)


def test_limits_are_said_with_one_decimal() -> None:
    limits = (89.9959, 2.5, 300, 3599.96)
    assert [*map(children.in_seconds, limits)] == ["90 s", "2.5 s", "300 s", "3600 s"]
