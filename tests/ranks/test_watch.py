"""What the thread that watches ranks makes of processes that end, stop or report an error."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from ingot.ir.mesh import ranks
from ingot.runtime.ranks.child import LocalRank
from ingot.runtime.ranks.reports import RankState
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.watch import RankWatch

pytestmark = pytest.mark.one_in_file(3)

ALL = ranks({"pp": 2, "tp": 2})
Children = dict[int, LocalRank]


@pytest.fixture
def children() -> Iterator[Children]:
    """Processes that only wait, in place of the ranks."""
    made = {rank.index: LocalRank(["sleep", "60"]) for rank in ALL[1:]}
    yield made
    for child in made.values():
        child.kill()
        child.wait()


def error(what: str) -> dict[str, str]:
    return {"what": what, "where": "plan.json", "expected": "", "hint": ""}


def lost_then_killed(area: SharedArea, children: Children) -> None:
    area.fail(1, RankState.LOST, error("the connection broke"))
    time.sleep(0.3)
    children[2].kill()


CASES: dict[str, tuple[Callable[[SharedArea, Children], None], str]] = {
    "killed": (
        lambda area, children: children[2].kill(),
        r"rank 2 \(pp=1 tp=0\) ended: it was killed by signal 9 \(SIGKILL\)",
    ),
    "terminated": (
        lambda area, children: children[3].terminate(),
        r"rank 3 \(pp=1 tp=1\) ended: .* signal 15 \(SIGTERM\)",
    ),
    "stopped": (lambda area, children: children[1].send_signal(signal.SIGSTOP), r"rank 1 \(pp=0 tp=1\) is stopped"),
    "failed": (
        lambda area, children: area.fail(3, RankState.FAILED, error("no memory")),
        r"rank 3 .* failed: no memory",
    ),
    "lost a peer that was killed": (lost_then_killed, r"rank 2 .* ended"),
    "lost a peer": (
        lambda area, children: area.fail(1, RankState.LOST, error("it broke")),
        r"rank 1 .* failed: it broke",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_fault_ends_all(case: str, children: Children) -> None:
    fault, expected = CASES[case]
    area = SharedArea(len(ALL))
    watch = RankWatch(area, ALL, children)
    time.sleep(0.15)
    assert watch.fault is None
    begin = time.monotonic()
    fault(area, children)
    watch.wait(10)
    assert time.monotonic() - begin < 5
    assert watch.fault is not None
    assert re.search(expected, watch.fault.what), watch.fault.what
    assert [child.wait(5) for child in children.values()] != [0, 0, 0], "all have ended"


def test_a_process_that_ends_by_itself(children: Children) -> None:
    children[1].kill()
    children[1].wait()
    children[1] = LocalRank([sys.executable, "-c", "raise SystemExit(3)"])
    watch = RankWatch(SharedArea(len(ALL)), ALL, children)
    watch.wait(10)
    assert watch.fault is not None and watch.fault.what.endswith("ended: it exited with status 3")


def test_a_short_stop_is_no_fault(children: Children) -> None:
    watch = RankWatch(SharedArea(len(ALL)), ALL, children)
    os.kill(children[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(children[1].pid, signal.SIGCONT)
    time.sleep(0.4)
    assert watch.fault is None
    watch.stop()
