"""Commands that have to end well, for tests of what is installed."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] = os.environ) -> str:
    """What the command prints. Its errors and outputs are the test's failure where it does not end with 0."""
    done = subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
