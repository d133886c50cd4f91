"""How much of what is planted `ingot bisect` finds: faults by seed, and healthy artifacts, each in a new process.

    python tests/debug/campaign.py --faults 200 --healthy 50 --seed 1 --jobs 2 --out results.jsonl

Each line of the output is one try: what was planted, the truth, the verdict, and what of it is right.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from planted.catalogue import SOURCES, compile_healthy, draw_fault
from planted.fault import NoFault, Setup, work_folder
from planted.healthy import draw_setup

# Seconds: a bisection may take two minutes. Drawing compiles a few models first, some with cold caches.
LIMIT, DRAWING = 120, 600
QUICK = tuple(name for name, source in SOURCES.items() if not source.slow)


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no verdict within {seconds} s")

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
    except TimeoutError as error:
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
    """Compile something healthy and ask bisect, who should blame nobody."""
    with _folder() as folder:
        setup: Setup = draw_setup(seed, slow=slow)
        healthy = compile_healthy(setup, folder)
        found = _verdict(healthy.artifact, healthy.checkpoint, None, limit)
        fine = found["verdict"].get("kind") == "healthy"
        return {"seed": seed, "healthy": True, "setup": str(setup), **found, "score": {"exact": fine}}


def in_new_process(what: str, seed: str, sources: Sequence[str], limit: int = LIMIT) -> dict[str, Any]:
    command = [sys.executable, __file__, f"--one-{what}", seed, "--sources", ",".join(sources), "--limit", str(limit)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit + DRAWING, check=False)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        tail = done.stderr[-1500:] if isinstance(error, ValueError | IndexError) else "no end"
        return {"seed": seed, "verdict": {"kind": "crash", "error": tail}, "score": {"exact": False}}


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """A table: by what is to blame, how many were tried, named to pass or provider, rewrite and node."""
    faults = [one for one in results if "truth" in one]
    lines = [f"{'blamed':<30}{'tried':>6}{'blamed':>8}{'rewrite':>9}{'node':>6}{'exact':>7}{'seconds':>9}{'cpu':>7}"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in faults:
        truth = one["truth"]
        groups.setdefault(" ".join([truth["kind"], truth["blamed"]]).strip(), []).append(one)
    for name, group in [*sorted(groups.items()), ("all", faults)]:
        counts = [sum(one["score"][key] for one in group) for key in ("blamed", "rewrite", "node", "exact")]
        longest = [max((one[key] for one in group), default=0.0) for key in ("seconds", "cpu_seconds")]
        lines.append(
            f"{name:<30}{len(group):>6}{counts[0]:>8}{counts[1]:>9}{counts[2]:>6}{counts[3]:>7}"
            f"{longest[0]:>9.1f}{longest[1]:>7.1f}"
        )
    healthy = [one for one in results if one.get("healthy")]
    if healthy:
        lines.append(f"healthy: {sum(one['score']['exact'] for one in healthy)} of {len(healthy)} without a culprit")
    lines.append(f"equivalent mutants redrawn: {sum(one.get('equivalent', 0) for one in faults)}")
    odd = Counter(str(one["verdict"]["kind"]) for one in results if "verdict" in one and not one["score"]["exact"])
    lines.append("not exact, by what was said: " + (", ".join(f"{kind} {n}" for kind, n in odd.items()) or "none"))
    broken = [one["seed"] for one in results if "truth" not in one and not one.get("healthy")]
    lines += [f"no try: {', '.join(broken)}"] if broken else []
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sources", default=",".join(SOURCES), help="what faults are drawn from")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for a verdict")
    parser.add_argument("--one-fault", help=argparse.SUPPRESS)
    parser.add_argument("--one-healthy", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    sources = tuple(asked.sources.split(","))
    if asked.one_fault:
        print(json.dumps(try_fault(asked.one_fault, sources, asked.limit)))
        return
    if asked.one_healthy:
        print(json.dumps(try_healthy(asked.one_healthy, limit=asked.limit)))
        return
    tries = [("fault", f"{asked.seed}-{number}") for number in range(asked.faults)]
    tries += [("healthy", f"{asked.seed}-{number}") for number in range(asked.healthy)]
    random.Random(0).shuffle(tries)  # so that a part of the output stands for the whole
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(asked.jobs) as pool, contextlib.ExitStack() as stack:
        out = stack.enter_context(asked.out.open("a")) if asked.out else None
        for result in pool.map(lambda item: in_new_process(*item, sources, asked.limit), tries):
            results.append(result)
            if out is not None:
                out.write(json.dumps(result) + "\n")
                out.flush()
            print(_line(result), flush=True)
    print(summary(results))


def _line(result: Mapping[str, Any]) -> str:
    verdict = result.get("verdict", {})
    truth = result.get("truth", {"kind": "healthy" if result.get("healthy") else "?", "blamed": "", "what": ""})
    mark = "ok  " if result.get("score", {}).get("exact") else "MISS"
    said = f"{verdict.get('kind')} {verdict.get('blamed', '')} {verdict.get('node', '')}"
    what = f"{truth['kind']} {truth['blamed']}: {truth['what'][:70]}"
    return f"{mark} {result['seed']}: {what} -> {said}, {result.get('seconds', 0)} s"


if __name__ == "__main__":
    main(sys.argv[1:])
