"""A rank of a mesh, in its own process, with a planted fault in one call.

    python planted_rank.py FOLDER RANK AREA ORDERS

The arguments are those of `ingot.runtime.ranks.worker`. The environment has the fault as JSON: the rank, the op, and
either the seconds for which each call of that op sleeps, or the number of its calls before one fails.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "INGOT_TEST_PLANTED"


def plant(monkeypatch: pytest.MonkeyPatch, rank: int, op: str, **fault: float | str) -> None:
    """Let the processes of ranks that start from now on have a fault: `sleep` seconds, or the text `fails` of an
    error, or `kills` for a process that ends."""
    import ingot.runtime.ranks.processes as module

    monkeypatch.setenv(VARIABLE, json.dumps({"rank": rank, "op": op, **fault}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(module, "module_command", lambda name: [sys.executable, str(Path(__file__))])


def _main() -> None:
    import ingot.runtime.steps.bucket as module
    from ingot.runtime.ranks.worker import main

    planted = json.loads(os.environ[VARIABLE])
    find, calls = module.find_op, [0]

    def found(target: str, *given: Any) -> Any:
        run = find(target, *given)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            time.sleep(planted.get("sleep", 0.0))
            if "kills" in planted and calls[0] > planted["kills"]:
                os.kill(os.getpid(), 9)
            if "fails" in planted and calls[0] > planted["after"]:
                raise ZeroDivisionError(planted["fails"])
            return run(*args, **kwargs)

        return faulty if target == planted["op"] else run

    if int(sys.argv[2]) == planted["rank"]:
        module.find_op = found
    main()


if __name__ == "__main__":
    _main()
