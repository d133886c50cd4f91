"""Measure the time from the start of a process to the first token of an artifact.

    python benchmarks/cold_start.py ARTIFACT [--tries 3] [--json FILE]

A new process imports Ingot, loads the artifact and generates one token after a prompt of 128 tokens, as `ingot bench
startup` measures it. Before each try, this process reads all files of the artifact, so the page cache holds as many of
them as memory has room for. It does not read the files of Python packages, so the first try may read these from a disk.
The best of some tries counts, and all are kept.

The memory of a start is the most that the process and all that it starts have had, in any try, in samples of every 20
ms. Pages of files on a disk do not count. It is at most the sum of three peaks: anonymous memory, shared memory
(through blocks of it weights are copied to a GPU, and the driver locks them), and what torch's allocator has pinned.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from decode_method import PROMPT_TOKENS
from process_samples import PeakMemory, children_memory
from results import Figure, add_json_option, report

from ingot.bench.children import ChildError
from ingot.bench.startup import Start, start

PHASES = {
    "start": "starting Python",
    "import": "importing the package",
    "load": "making the engine: imports that are left, and loading the model",
    "prompt": "the prompt of 128 tokens and its token",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120.0, help="timeout of a try, in seconds")
    add_json_option(parser)
    options = parser.parse_args()
    tries: list[Start] = []
    peaks: list[PeakMemory] = []
    for _ in range(options.tries):
        try:
            with children_memory() as peak:
                tries.append(start(options.artifact, tokens=PROMPT_TOKENS, timeout=options.timeout))
        except ChildError as error:
            sys.exit(f"{options.artifact} generated no token: {error}")
        peaks.append(peak)
    settings = {"artifact": options.artifact.name, "tries": options.tries}
    figures = first_token_figures(tries) | memory_figures(tries, peaks)
    size = sum(path.stat().st_size for path in options.artifact.rglob("*") if path.is_file())
    figures["artifact"] = Figure(value=size, unit="B", what="all files of the artifact")
    report(__file__, options.json, settings, figures)


def first_token_figures(tries: Sequence[Start]) -> dict[str, Figure]:
    """Return the times from the start of a process to its first token, as figures by name.

    A figure is a number of a benchmark's result. The values are the total and the parts of the fastest start. The
    total's figure also keeps the totals of all starts.
    """
    best = min(tries, key=lambda one: one.first_token)
    totals = tuple(one.first_token for one in tries)
    found = {
        "first_token": Figure(
            value=best.first_token, unit="s", what="start of the process to its first token", values=totals
        )
    }
    for name, what in PHASES.items():
        found[f"first_token_{name}"] = Figure(value=best.phases[name], unit="s", what=what)
    for name, seconds in best.loading.items():
        found[f"load_{_slug(name)}"] = Figure(value=float(seconds), unit="s", what=f"of it: {name}")
    return found


def memory_figures(tries: Sequence[Start], peaks: Sequence[PeakMemory]) -> dict[str, Figure]:
    """Return the most host memory that starts of an artifact took, as figures by name. `peaks` are in the order of
    `tries`."""
    parts = {
        "anonymous": (tuple(peak.together for peak in peaks), "anonymous memory, peak"),
        "shared": (tuple(peak.shared for peak in peaks), "shared memory, peak"),
        "pinned": (tuple(one.pinned for one in tries), "pinned by torch's allocator, peak"),
        "locked": (tuple(peak.locked for peak in peaks), "locked as the kernel counts it, part of the others"),
    }
    sums = tuple(map(sum, zip(*(parts[name][0] for name in ("anonymous", "shared", "pinned")), strict=True)))
    what = "host memory up to the first token, at most: anonymous, shared and pinned"
    return {
        f"start_{name}": Figure(value=max(values), unit="B", what=what, values=values)
        for name, (values, what) in {"memory": (sums, what), **parts}.items()
    }


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    main()
