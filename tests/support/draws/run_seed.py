"""The seed of what is drawn at random in a run: the same for all workers, and another one for every commit."""

import os
import subprocess
from functools import lru_cache
from pathlib import Path

OUTSIDE_OF_GIT = "0"


@lru_cache(maxsize=1)
def run_seed() -> str:
    """INGOT_TEST_SEED, or else the commit that is checked out. A test that draws from it prints it when it fails."""
    if given := os.environ.get("INGOT_TEST_SEED"):
        return given
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return OUTSIDE_OF_GIT
    return done.stdout.strip() or OUTSIDE_OF_GIT


def again(draw: object) -> str:
    """How to repeat a failing draw, for an assertion's message."""
    return f"draw {draw}; repeat it with INGOT_TEST_SEED={run_seed()}"
