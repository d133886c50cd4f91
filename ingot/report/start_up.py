"""How long starting to serve takes, measured: a process of its own, from its start to a first token.

    python -m ingot.report.start_up ARTIFACT BEGIN

prints the parts in seconds as JSON; BEGIN is the monotonic clock, which all processes share, when it was started.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from ingot.ir.errors import ArtifactError

_SHOWN = 2000  # characters of what a process that failed said last


def measure_start_up(folder: Path) -> dict[str, float]:
    """Start an artifact as serving does, on this machine; seconds by part, in order. Runs the artifact's native code.

    Files that were read before are likely in memory. Raises ArtifactError where the artifact does not start here.
    """
    command = [sys.executable, "-m", "ingot.report.start_up", str(folder), repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArtifactError(
            f"the artifact does not start on this machine:\n{done.stderr.strip()[-_SHOWN:]}",
            where=str(folder),
            hint="without --start-up the report needs no machine that can run it",
        )
    parts: dict[str, float] = json.loads(done.stdout)
    return parts


def _main(folder: str, begin: float) -> None:
    parts: dict[str, float] = {}

    def done(part: str, since: float) -> float:
        now = time.monotonic()
        parts[part] = now - since
        return now

    now = done("Python", begin)
    from ingot.ir.errors import IngotError
    from ingot.llm import LLM
    from ingot.runtime.sampling_params import SamplingParams

    now = done("imports", now)
    try:
        llm = LLM(folder)
        now = done("artifact: checked and loaded", now)
        # Making an LLM imports torch and the engine first.
        parts["imports"] += llm.timings["engine"]
        parts["artifact: checked and loaded"] -= llm.timings["engine"]
        llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, temperature=0.0))
        done("first token", now)
    except IngotError as error:
        sys.exit(str(error))
    print(json.dumps(parts))


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]))
