"""From the start of a process to the first token of an artifact.

    python benchmarks/cold_start.py ARTIFACT [--tries 3] [--json FILE]

A new process imports Ingot, loads the artifact and makes one token behind a prompt of 128 tokens; see first_token.py.
The page cache holds the artifact: all of its files are read before. CUDA loads the code of all kernels at once, so that
nothing is left for later steps. The best of some tries counts, and all are kept.
"""

import argparse
import re
import sys
from pathlib import Path

from children import ChildError, Ended, run_child
from results import Figure, add_json_option, report

CHILD = Path(__file__).with_name("first_token.py")
_BLOCK_BYTES = 1 << 24
# The phases of a start by the moment at which each ends; the next one begins there.
PHASES = {
    "begun": ("start", "starting Python"),
    "imported": ("import", "importing the package"),
    "loaded": ("load", "making the engine: imports that are left, and loading the model"),
    "first": ("prompt", "the prompt of 128 tokens and its token"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120.0, help="of a try, in seconds")
    add_json_option(parser)
    options = parser.parse_args()
    try:
        tries = [start(options.artifact, options.timeout) for _ in range(options.tries)]
    except ChildError as error:
        sys.exit(f"{options.artifact} gave no token: {error}")
    report(options.json, {"artifact": options.artifact.name, "tries": options.tries}, first_token_figures(tries))


def start(artifact: Path, timeout: float) -> Ended:
    """One try. Raises ChildError."""
    read_files(artifact)
    return run_child([CHILD, artifact], env={"CUDA_MODULE_LOADING": "EAGER"}, timeout=timeout)


def read_files(folder: Path) -> None:
    """Read every file, which leaves it in the page cache."""
    block = bytearray(_BLOCK_BYTES)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def first_token_figures(tries: list[Ended]) -> dict[str, Figure]:
    """The time to the first token, and what it was made of in the best try."""
    totals = [one.value["clock"]["first"] - one.started for one in tries]
    best = tries[totals.index(min(totals))]
    found = {
        "first_token": Figure(
            value=min(totals), unit="s", what="start of the process to its first token", values=tuple(totals)
        )
    }
    before = best.started
    for moment, (name, what) in PHASES.items():
        ended = best.value["clock"][moment]
        found[f"first_token_{name}"] = Figure(value=ended - before, unit="s", what=what)
        before = ended
    for name, seconds in best.value.get("phases", {}).items():
        found[f"load_{_slug(name)}"] = Figure(value=float(seconds), unit="s", what=f"of it: {name}")
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    main()
