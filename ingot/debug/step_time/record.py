"""Record a profiler trace of some steps, for `read_trace` to read."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ingot.debug.step_time.trace import CALL
from ingot.runtime.steps.bucket import Call
from ingot.runtime.steps.executor import Executor

_LAUNCHED = 3  # steps launched call by call
_REPLAYED = 12  # steps as they are served


def record_trace(
    executor: Executor,
    stream: torch.cuda.Stream | None,
    launched: Mapping[str, torch.Tensor],
    served: Mapping[str, torch.Tensor],
    path: Path,
) -> None:
    """Write a torch profiler trace of some steps to `path`, compressed if its name ends in .gz.

    The first steps run on the inputs `launched`, call by call. Each call has a profiler span with its number. Then
    steps run on the inputs `served`, as in serving. These may replay a CUDA graph.
    """
    with torch.cuda.stream(stream), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(_LAUNCHED):
            numbers = itertools.count()

            def spanned(call: Call, numbers: "itertools.count[int]" = numbers) -> Any:
                with record_function(f"{CALL}{next(numbers)}"):
                    return call()

            executor.launch(launched, watch=spanned)
            executor.synchronize()
        for _ in range(_REPLAYED):
            executor.launch(served)
        executor.synchronize()
    seen.export_chrome_trace(str(path))
