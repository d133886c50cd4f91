"""Time the start of an artifact, from a new process to its first token.

All files of the artifact are read first, so that the page cache holds them. CUDA loads the code of all kernels eagerly,
so that no later step has to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ingot.bench.children import Ended, run_child
from ingot.bench.metrics import LATENCY_PERCENTILES, percentile

_BLOCK_BYTES = 1 << 24
# The phases of a start, by the moment at which each ends and the next begins.
PHASES = {"begun": "start", "imported": "import", "loaded": "load", "first": "prompt"}


@dataclass(frozen=True)
class Start:
    """The times of one start, in seconds. `first_token` counts from the start of the process; `phases` are its parts.

    "start" is Python's own start, "import" the package's import, "load" making the engine (remaining imports, loading
    the model), "prompt" the prompt and its token. `loading` are the parts of "load", which may overlap.
    """

    first_token: float
    phases: Mapping[str, float]
    loading: Mapping[str, float]

    @property
    def ready(self) -> float:
        """Return the seconds from the start of the process until it can accept requests."""
        return self.first_token - self.phases["prompt"]


def start(artifact: Path, *, tokens: int, timeout: float) -> Start:
    """Start the artifact once in a new process, with a prompt of `tokens` tokens, and return the times. Raises
    ChildError.
    """
    read_files(artifact)
    script: list[str | Path] = ["-m", "ingot.bench.first_token", artifact, str(tokens)]
    return start_of(run_child(script, env={"CUDA_MODULE_LOADING": "EAGER"}, timeout=timeout))


def start_of(ended: Ended) -> Start:
    """Return the times of a child process, of any engine, that wrote the clock at the end of each phase of `PHASES`."""
    clock: Mapping[str, float] = ended.value["clock"]
    moments = [ended.started, *(clock[moment] for moment in PHASES)]
    phases = {name: moments[place + 1] - moments[place] for place, name in enumerate(PHASES.values())}
    return Start(clock["first"] - ended.started, phases, ended.value.get("phases", {}))


def startup_metrics(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the results of several starts. `warm_startup` fields are times to make the engine, as in `vllm bench
    startup`.

    `ready` and `first_token` count from the start of the process. `phases` and `loading` are those of the median start.
    """
    loads = [one.phases["load"] for one in starts]
    middle = sorted(starts, key=lambda one: one.first_token)[(len(starts) - 1) // 2]
    return {
        "avg_warm_startup_time": fmean(loads),
        "warm_startup_times": loads,
        "warm_startup_percentiles": {f"{percent:g}": percentile(loads, percent) for percent in LATENCY_PERCENTILES},
        "median_ready_time": median(one.ready for one in starts),
        "ready_times": [one.ready for one in starts],
        "median_first_token_time": median(one.first_token for one in starts),
        "first_token_times": [one.first_token for one in starts],
        "phases": dict(middle.phases),
        "loading": dict(middle.loading),
    }


def read_files(folder: Path) -> None:
    """Read every file in the folder, so that the page cache of the system holds it."""
    block = bytearray(_BLOCK_BYTES)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
