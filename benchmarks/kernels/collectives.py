"""Measure the all-reduce of two or more GPUs by size, inside a CUDA graph, and the bandwidth of a copy between GPUs.

    python benchmarks/kernels/collectives.py [--ranks 2] [--sizes 8192,65536,…] [--json FILE]

Each rank is a process with one GPU, connected as the ranks of a mesh are. A graph holds a chain of all-reduces: each
reads the result of the one before. A figure is the median of several replays by the clock of rank 0's GPU, divided by
the number of calls. Values begin as ones, so each result is known, and the last one is checked. A bandwidth is the
bytes that a rank must send and receive, over the time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import torch
from results import Figure, add_json_option, report

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus

_SIZES = "8192,65536,262144,1048576,4194304,16777216,67108864"
_CALLS = 20  # all-reduces of a graph
_REPLAYS = 30
_COPY_BYTES = 1 << 30
_SECONDS = 240.0  # for all ranks together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="the number of GPUs")
    parser.add_argument("--sizes", default=_SIZES, help="bytes of a rank's values, separated by commas")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # of a child: its index and the folder to meet in
    add_json_option(parser)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.rank is not None:
        index, _, folder = options.rank.partition(":")
        measure_rank(int(index), options.ranks, Path(folder), sizes)
        return
    if (count := torch.cuda.device_count()) < options.ranks:
        sys.exit(f"{options.ranks} ranks need as many GPUs, and this process can use {count}")
    copy = peer_copy_bandwidth()
    times = run_ranks(options.ranks, options.sizes)
    report(options.json, {"ranks": options.ranks, "sizes": options.sizes}, figures(times, copy, options.ranks))


def figures(times: Mapping[str, list[float]], copy: float, ranks: int) -> dict[str, Figure]:
    """Return the figures by name. `times` has the seconds of a call in each replay, by size in bytes."""
    found = {"peer_copy": Figure(value=copy, unit="B/s", what="a large copy from one GPU to another, the best")}
    for size, seconds in times.items():
        took = statistics.median(seconds)
        what = f"an all-reduce of {int(size)} bytes of bfloat16 by {ranks} GPUs in a graph"
        least = 2 * (ranks - 1) / ranks * int(size) / copy
        found |= {
            f"all_reduce_{size}.nccl": Figure(value=took, unit="s", what=f"{what}, NCCL, the median"),
            f"all_reduce_{size}.nccl.of_copy": Figure(value=least / took, unit="", what=f"{what}: of the peer copy"),
        }
    return found


def peer_copy_bandwidth() -> float:
    """Return the bytes per second of a large copy from GPU 0 to GPU 1. The best of several copies counts."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return _COPY_BYTES / min(times)


def run_ranks(ranks: int, sizes: str) -> dict[str, list[float]]:
    """Start a process for each rank, and return what rank 0 has measured."""
    names = visible_gpus(torch.cuda.device_count(), os.environ.get(GPU_VARIABLE))
    with tempfile.TemporaryDirectory() as folder:
        children = [
            subprocess.Popen(
                [sys.executable, __file__, "--ranks", str(ranks), "--sizes", sizes, "--rank", f"{index}:{folder}"],
                env={**os.environ, GPU_VARIABLE: names[index]},
                stdout=subprocess.PIPE if index == 0 else None,
                text=True,
            )
            for index in range(ranks)
        ]
        try:
            text, _ = children[0].communicate(timeout=_SECONDS)
            statuses = [child.wait(timeout=10) for child in children]
        finally:
            for child in children:
                child.kill()
    if any(statuses):
        sys.exit(f"a rank failed: the exit statuses are {statuses}")
    found: dict[str, list[float]] = json.loads(text.splitlines()[-1])
    return found


def measure_rank(index: int, ranks: int, folder: Path, sizes: list[int]) -> None:
    """Run one rank's part of all measurements. Rank 0 prints the seconds of a call, by size."""
    torch.cuda.init()
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        communicator = NcclCommunicator(folder, "benchmark", index, ranks)
        for size in sizes:
            found[str(size)] = _seconds(communicator, size, ranks, stream)
    if index == 0:
        print(json.dumps(found), flush=True)
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's threads need no end


def _seconds(communicator: NcclCommunicator, size: int, ranks: int, stream: torch.cuda.Stream) -> list[float]:
    x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    communicator.total(x)  # connects
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    y = x
    for _ in range(_CALLS):
        y = communicator.total(y)
    graph.capture_end()
    times = []
    for _ in range(_REPLAYS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    # Each call multiplies the ones by the number of ranks: exact in bfloat16 for a power of two.
    expected = torch.tensor(float(ranks) ** _CALLS, dtype=torch.bfloat16)
    if ranks in (2, 4, 8) and not bool((y == expected.item()).all()):
        sys.exit(f"the sum of {size} bytes is wrong: {y[0].item()} for {expected.item()}")
    return times[3:]


if __name__ == "__main__":
    main()
