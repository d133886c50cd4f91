"""How much of what is planted `ingot bisect` finds: faults by seed, and healthy artifacts, each in a new process.

    python tests/debug/campaign.py --faults 200 --healthy 50 --seed 1 --jobs 2 --out results.jsonl

Each line of the output is one try: what was planted, the truth, the verdict, and what of it is right.
"""

import argparse
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.extend(map(str, (Path(__file__).parents[1] / "support").glob("*/")))

from planted.catalogue import SOURCES
from planted.trial import LIMIT, in_new_process


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """A table: by what is to blame, how many were tried, named to pass or backend, rewrite and node."""
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
    asked = parser.parse_args(arguments)
    sources = tuple(asked.sources.split(","))
    tries = [("fault", f"{asked.seed}-{number}") for number in range(asked.faults)]
    tries += [("healthy", f"{asked.seed}-{number}") for number in range(asked.healthy)]
    random.Random(0).shuffle(tries)  # so that a part of the output stands for the whole
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(asked.jobs) as pool, contextlib.ExitStack() as stack:
        out = stack.enter_context(asked.out.open("a")) if asked.out else None
        waiting = [pool.submit(in_new_process, what, seed, sources, asked.limit) for what, seed in tries]
        for done in as_completed(waiting):
            result = done.result()
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
