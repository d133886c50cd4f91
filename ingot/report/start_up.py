"""Measure how long serving takes to start: a new process, up to its first token."""

from pathlib import Path

from ingot.bench.children import ChildError
from ingot.bench.startup import start
from ingot.ir.errors import ArtifactError

_TIMEOUT_SECONDS = 600.0  # far above the start of any artifact, which is limited by reading the weights


def measure_start_up(folder: Path) -> dict[str, float]:
    """Start serving an artifact in a new process on this machine, up to the first token, and time it.

    Return the seconds of each part of the start by name, in order. This runs the artifact's native code. Its files are
    read beforehand, so they are in the page cache. Raises ArtifactError if the artifact does not start here.
    """
    try:
        found = start(folder, tokens=1, timeout=_TIMEOUT_SECONDS)
    except ChildError as error:
        raise ArtifactError(
            f"the artifact does not start on this machine: {error}",
            where=str(folder),
            hint="without --start-up, the report works on any machine",
        ) from error
    engine = found.loading["engine"]  # making an LLM imports torch and the engine first
    return {
        "Python": found.phases["start"],
        "imports": found.phases["import"] + engine,
        "artifact: checked and loaded": found.phases["load"] - engine,
        "first token": found.phases["prompt"],
    }
