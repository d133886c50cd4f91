"""How long starting to serve takes, measured: a process of its own, from its start to a first token."""

from pathlib import Path

from ingot.bench.children import ChildError
from ingot.bench.startup import start
from ingot.ir.errors import ArtifactError

_TIMEOUT_SECONDS = 600.0  # far above what any artifact takes: the start of the largest is bound by reading its weights


def measure_start_up(folder: Path) -> dict[str, float]:
    """Start an artifact as serving does, on this machine; seconds by part, in order. Runs the artifact's native code.

    All files are read before. Raises ArtifactError where the artifact does not start here.
    """
    try:
        found = start(folder, tokens=1, timeout=_TIMEOUT_SECONDS)
    except ChildError as error:
        raise ArtifactError(
            f"the artifact does not start on this machine: {error}",
            where=str(folder),
            hint="without --start-up the report needs no machine that can run it",
        ) from error
    engine = found.loading["engine"]  # making an LLM imports torch and the engine first
    return {
        "Python": found.phases["start"],
        "imports": found.phases["import"] + engine,
        "artifact: checked and loaded": found.phases["load"] - engine,
        "first token": found.phases["prompt"],
    }
