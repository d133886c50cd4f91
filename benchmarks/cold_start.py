"""Measure the time from the start of a process to the first token of an artifact.

    python benchmarks/cold_start.py ARTIFACT [--tries 3] [--json FILE]

A new process imports Ingot, loads the artifact and generates one token after a prompt of 128 tokens, as `ingot bench
startup` measures it. The best of some tries counts, and all are kept.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from decode_method import PROMPT_TOKENS
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
    try:
        tries = [start(options.artifact, tokens=PROMPT_TOKENS, timeout=options.timeout) for _ in range(options.tries)]
    except ChildError as error:
        sys.exit(f"{options.artifact} generated no token: {error}")
    report(
        __file__, options.json, {"artifact": options.artifact.name, "tries": options.tries}, first_token_figures(tries)
    )


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


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    main()
