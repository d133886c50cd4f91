"""What benchmarks run in processes of their own: the answer, the reason of a failure, and the end of what hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from child_script import script_of

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


def test_a_child_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    """The child runs a child in a session of its own, as benchmarks do that gpu.py runs."""
    inner = tmp_path / "inner.py"
    inner.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")
    text = "from ingot.bench.children import run_command\n"
    with pytest.raises(children.ChildError, match=r"ended after 2\.5 s"):
        children.run_child([script_of(tmp_path, text + f"run_command([sys.executable, {str(inner)!r}])")], timeout=2.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
