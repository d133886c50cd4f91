"""Measure `ingot bisect` on planted faults: the share it finds, its time, and its verdicts on healthy artifacts.

    python benchmarks/planted_faults.py --faults 200 --healthy 50 --seed 1

tests/debug/campaign.py draws the faults and runs each in its own process; that takes some 20 minutes on two idle cores.
`--tries FILE` reads the `--out` file of an earlier campaign instead of running one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT, Figure, print_figures, write_result

CAMPAIGN = ROOT / "tests" / "debug" / "campaign.py"


def figures(tries: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Return the figures of a campaign that plants faults in artifacts and checks whether they are found.

    `tries` has a record of each try. A try counts as not found if no fault could be planted.
    """
    healthy = [one for one in tries if one.get("healthy")]
    faults = [one for one in tries if not one.get("healthy")]
    seconds = [one["seconds"] for one in faults if "truth" in one]

    def share(part: str) -> float:
        return sum(bool(one["score"].get(part)) for one in faults) / len(faults)

    found = {
        "faults": Figure(value=len(faults), unit="", what="faults planted, equivalent ones drawn again"),
        "blamed": Figure(value=share("blamed"), unit="", what="share named to the pass, backend or recipe's step"),
        "exact": Figure(value=share("exact"), unit="", what="share named to the rewrite and node as well"),
        "seconds_median": Figure(value=statistics.median(seconds), unit="s", what="a verdict, the median"),
        "seconds_most": Figure(value=max(seconds), unit="s", what="a verdict, the longest"),
    }
    if healthy:
        right = sum(one["score"]["exact"] for one in healthy)
        found["healthy"] = Figure(value=len(healthy), unit="", what="healthy artifacts")
        found["healthy_accused"] = Figure(value=len(healthy) - right, unit="", what="healthy artifacts not called so")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tries", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tries = asked.tries or Path(folder) / "tries.jsonl"
        if asked.tries is None:
            options = {name: str(getattr(asked, name)) for name in ("faults", "healthy", "seed", "jobs")}
            arguments = [item for name, value in options.items() for item in (f"--{name}", value)]
            subprocess.run([sys.executable, str(CAMPAIGN), *arguments, "--out", str(tries)], check=True)
        found = figures([json.loads(line) for line in tries.read_text(encoding="utf-8").splitlines()])
    path = write_result(
        __file__,
        "planted_faults",
        {"seed": asked.seed, "jobs": asked.jobs, "layers": 4},
        found,
        packages=("torch", "transformers"),
        folder=asked.results,
    )
    print_figures(found)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
