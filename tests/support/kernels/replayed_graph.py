"""A call of an op by Triton's kernels in one CUDA graph, replayed for calls of the same sizes with other values."""

from collections.abc import Sequence
from pathlib import Path

import torch
from one_call import TARGET, OneCall, moved

from ingot.backends.triton import load as triton
from ingot.backends.triton.emit import Triton
from ingot.runtime.loading.load_context import on_one_device

_NO_RESULT = 113  # what a result of integers holds before a replay; one of floats holds NaN


def replays(calls: Sequence[OneCall], folder: Path, times: int = 1) -> list[list[torch.Tensor]]:
    """The results of each call, of which there are `times`. The graph is that of the first call.

    The launch before the capture fails if the host waits for the device. The machine code gets into `folder`, which is
    empty or new.
    """
    folder.mkdir(exist_ok=True)
    first = calls[0]
    executable = Triton().emit(first.body(), first.op, TARGET, folder)
    execute = triton.load(executable, folder, on_one_device("cuda"))
    on_device, held = [moved(tensor, "cuda") for tensor in first.tensors], first.tensors
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            execute(*on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = execute(*on_device)
    found: list[list[torch.Tensor]] = []
    for call in calls:
        for buffer, before, given in zip(on_device, held, call.tensors, strict=True):
            if given is not before:
                buffer.copy_(given)
        held = call.tensors
        found.append([])
        for _ in range(times):
            result.fill_(float("nan") if result.is_floating_point() else _NO_RESULT)
            graph.replay()
            found[-1].append(result.cpu())
    return found
