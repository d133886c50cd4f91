"""A rank of a mesh, in its own process, with a planted fault in one call.

    python planted_rank.py FOLDER RANK AREA ORDERS

The arguments are those of `ingot.runtime.ranks.worker`. The environment has the fault as JSON, with the rank.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "INGOT_TEST_PLANTED"


def plant(monkeypatch: pytest.MonkeyPatch, rank: int, op: str, **fault: float | str) -> None:
    """Give the calls of an op on a rank a fault, in a mesh that is started from now on.

    `sleep` is the seconds for which each of them sleeps. With `fails`, a call raises an error of that text; with
    `kills`, it kills its process. This is the call after the number in `after`.
    """
    import ingot.runtime.ranks.processes as processes
    import ingot.runtime.steps.bucket as bucket

    if rank == 0:
        monkeypatch.setattr(bucket, "find_op", _faulty(bucket.find_op, {"op": op, **fault}))
        return
    monkeypatch.setenv(VARIABLE, json.dumps({"rank": rank, "op": op, **fault}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(processes, "module_command", lambda name: [sys.executable, str(Path(__file__))])


def _faulty(find: Callable[..., Any], planted: Mapping[str, Any]) -> Callable[..., Any]:
    calls = 0

    def found(target: str, *given: Any) -> Any:
        run = find(target, *given)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            time.sleep(planted.get("sleep", 0.0))
            if calls > planted.get("after", calls):
                if "kills" in planted:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError(planted["fails"])
            return run(*args, **kwargs)

        return faulty if target == planted["op"] else run

    return found


def _main() -> None:
    import ingot.runtime.steps.bucket as bucket
    from ingot.runtime.ranks.worker import main

    planted = json.loads(os.environ[VARIABLE])
    if int(sys.argv[2]) == planted["rank"]:
        bucket.find_op = _faulty(bucket.find_op, planted)
    main()


if __name__ == "__main__":
    _main()
