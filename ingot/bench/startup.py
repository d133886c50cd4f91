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
    """The times of starting an artifact once in a new process, in seconds.

    `first_token` is the time from the start of the process to its first token. `phases` divides this time:

    - "start": the start of Python
    - "import": the import of the package
    - "load": making the engine
    - "prompt": the prompt, up to its first token

    `loading` divides "load" into imports and parts of loading the model. These may overlap. `pinned` is the most bytes
    of page-locked host memory that torch's allocator held.
    """

    first_token: float
    phases: Mapping[str, float]
    loading: Mapping[str, float]
    pinned: int = 0

    @property
    def ready(self) -> float:
        """Return the seconds from the start of the process until it can accept requests."""
        return self.first_token - self.phases["prompt"]


def start(artifact: Path, *, tokens: int, timeout: float) -> Start:
    """Load the artifact in a new process, complete a prompt of `tokens` tokens there, and return the times.

    Raises ChildError if the process fails or takes more than `timeout` seconds.
    """
    read_files(artifact)
    script: list[str | Path] = ["-m", "ingot.bench.first_token", artifact, str(tokens)]
    return start_of(run_child(script, env={"CUDA_MODULE_LOADING": "EAGER"}, timeout=timeout))


def start_of(ended: Ended) -> Start:
    """Return the times of an engine's start from the result of its process. The process may run any engine.

    The process must write a "clock" with time.time() at the end of each phase. The keys of `PHASES` name these moments.
    """
    clock: Mapping[str, float] = ended.value["clock"]
    moments = [ended.started, *(clock[moment] for moment in PHASES)]
    phases = {name: moments[place + 1] - moments[place] for place, name in enumerate(PHASES.values())}
    loading, pinned = ended.value.get("phases", {}), ended.value.get("pinned", 0)
    return Start(clock["first"] - ended.started, phases, loading, pinned)


def startup_metrics(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the result fields of several starts of an artifact, all in seconds.

    The `warm_startup` fields are the times of making the engine, as in `vllm bench startup`. The `ready` and
    `first_token` fields count from the start of the process. `phases` and `loading` are from the start with the median
    time to its first token.
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
    """Read every file in the folder into the system's page cache."""
    block = bytearray(_BLOCK_BYTES)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
