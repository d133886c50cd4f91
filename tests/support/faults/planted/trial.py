"""One try: plant the fault of a seed, or compile something healthy, ask bisect, and judge what it says.

As a script, which a new process runs: `trial.py fault|healthy SEED [SOURCES] [LIMIT]` prints the result as JSON.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.extend(map(str, Path(__file__).parents[2].glob("*/")))

from planted.catalogue import SOURCES, compile_healthy, draw_fault
from planted.fault import NoFault, Setup, work_folder
from planted.healthy import draw_setup

# Seconds: a bisection may take two minutes. Drawing compiles a few models first, some with cold caches.
LIMIT, DRAWING = 120, 600
QUICK = tuple(name for name, source in SOURCES.items() if not source.slow)


class _TimeIsUp(BaseException):
    """The time limit has passed. It is no Exception, so `except Exception` does not catch it."""


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TimeIsUp(f"no verdict within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=work_folder()))
    # Checkpoints are written once, for all tries.
    shared = work_folder() / "checkpoints"
    shared.mkdir(exist_ok=True)
    (folder / "checkpoints").symlink_to(shared)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for: what a busy machine does not stretch."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _verdict(artifact: Path, checkpoint: Path, oracle: str | None, limit: int) -> dict[str, Any]:
    """What bisect says, as JSON, and the seconds that it took; "error" in place of a verdict where it fails."""
    from ingot.debug.bisect import bisect

    begin, used = time.perf_counter(), _cpu_seconds()
    try:
        with _limited(limit):
            said = bisect(artifact, oracle=oracle, checkpoint=checkpoint).to_json()
    except _TimeIsUp as error:
        said = {"kind": "timeout", "error": str(error)}
    except Exception as error:  # whatever it is, it is no verdict
        said = {"kind": "crash", "error": f"{type(error).__name__}: {error}"[:2000]}
    return {
        "verdict": said,
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(_cpu_seconds() - used, 2),
    }


def try_fault(seed: str, sources: Sequence[str] = tuple(SOURCES), limit: int = LIMIT) -> dict[str, Any]:
    """Plant the fault of a seed, ask bisect, and judge its verdict."""
    with _folder() as folder:
        try:
            planted = draw_fault(seed, folder, {name: SOURCES[name] for name in sources})
        except NoFault as reason:
            return {"seed": seed, "no_fault": str(reason)}
        fault = planted.fault
        with fault.plant():
            found = _verdict(planted.artifact, planted.checkpoint, fault.oracle, limit)
        score = fault.truth.judge(found["verdict"])
        unseen = sum("nothing shows" in reason for reason in planted.redrawn)
        return {
            "seed": seed,
            **fault.to_json(),
            "shows": planted.shows,
            "redrawn": len(planted.redrawn),
            "equivalent": unseen,
            **found,
            "score": {**asdict(score), "exact": score.exact},
        }


def try_healthy(seed: str, *, slow: bool = True, limit: int = LIMIT) -> dict[str, Any]:
    """Compile a healthy artifact and run bisect, which should find no fault."""
    with _folder() as folder:
        setup: Setup = draw_setup(seed, slow=slow)
        healthy = compile_healthy(setup, folder)
        found = _verdict(healthy.artifact, healthy.checkpoint, None, limit)
        fine = found["verdict"].get("kind") == "healthy"
        return {"seed": seed, "healthy": True, "setup": str(setup), **found, "score": {"exact": fine}}


def in_new_process(what: str, seed: str, sources: Sequence[str], limit: int = LIMIT) -> dict[str, Any]:
    """A try in a process of its own: no plant and no crash of one reaches another."""
    command = [sys.executable, __file__, what, seed, ",".join(sources), str(limit)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit + DRAWING, check=False)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        tail = done.stderr[-1500:] if isinstance(error, ValueError | IndexError) else "no end"
        return {"seed": seed, "verdict": {"kind": "crash", "error": tail}, "score": {"exact": False}}


def main(what: str, seed: str, sources: str = ",".join(SOURCES), limit: str = str(LIMIT)) -> None:
    if what == "fault":
        print(json.dumps(try_fault(seed, tuple(sources.split(",")), int(limit))))
    else:
        print(json.dumps(try_healthy(seed, limit=int(limit))))


if __name__ == "__main__":
    main(*sys.argv[1:])
