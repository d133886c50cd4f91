"""A mesh whose rank 0 is killed: it cannot tell the other ranks."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from thread_ranks import is_gone


@contextmanager
def rank_0_killed(
    command: Sequence[str],
    env: Mapping[str, str],
    count: int,
    seconds: float,
    serves: Callable[[], bool] = lambda: True,
) -> Iterator[list[int]]:
    """Run a command that serves as rank 0 and prints the ids of `count` other processes. Kill it when `serves` holds.

    Those processes must end in `seconds`. Gives their ids.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        pids = [int(one) for one in child.stdout.readline().split()]
        assert len(pids) == count and not any(map(is_gone, pids)) and serves()
        begin = time.monotonic()
        child.kill()
        while time.monotonic() - begin < seconds and not all(map(is_gone, pids)):
            time.sleep(0.02)
        assert all(map(is_gone, pids))
        print(f"rank 0 was killed: the others ended after {time.monotonic() - begin:.2f} s")
        yield pids
