"""Measure the all-reduce of two or more GPUs by size, inside a CUDA graph, and the bandwidth of a copy between GPUs.

    python benchmarks/kernels/collectives.py [--ranks 2] [--sizes 8192,65536,…] [--providers nccl,peer] [--json FILE]

Each rank is a process with one GPU, connected as the ranks of a mesh are. A graph holds a chain of all-reduces: each
reads the result of the one before. A figure is the median of several replays by the clock of rank 0's GPU, divided by
the number of calls. Values begin as ones, so each result is known, and the last one is checked. A bandwidth is the
bytes that a rank must send and receive, over the time.

The provider peer is the kernel of the backend of that name, for all sizes that it can compute, so also for those that
backends/peer/sizes.py leaves to NCCL. Its sums of random values must
have the bits of NCCL's. The providers nccl_add and peer_add add a residual too: by a kernel after NCCL's, and in the
same launch. The residual is zero while they are timed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import torch
from results import Figure, add_json_option, report

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer.emit import Peer
from ingot.backends.peer.load import PeerAllReduce
from ingot.backends.peer.load import load as load_peer
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.machine.target import Target
from ingot.ir.mesh import Rank
from ingot.ir.ops import all_reduce
from ingot.ir.parse import parse_type
from ingot.ir.program import Dim, Program
from ingot.runtime.loading.load_context import context_on

_SIZES = "8192,65536,262144,1048576,4194304,16777216,67108864"
_CALLS = 20  # all-reduces of a graph
_REPLAYS = 30
_COPY_BYTES = 1 << 30
_SECONDS = 480.0  # for all ranks together, of which a start takes most
_PROVIDERS = ("nccl", "peer", "nccl_add", "peer_add")
_TYPE = "bf16[T, 8]"  # of the compiled call; the kernel takes any number of vectors

Total = Callable[[torch.Tensor], torch.Tensor]
# By size in bytes and provider: the seconds of a call in each replay.
Times = Mapping[str, Mapping[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="the number of GPUs")
    parser.add_argument("--sizes", default=_SIZES, help="bytes of a rank's values, separated by commas")
    parser.add_argument("--providers", default=",".join(_PROVIDERS), help="of the all-reduce, separated by commas")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # of a child: its index and the folder to meet in
    add_json_option(parser)
    options = parser.parse_args()
    sizes, providers = [int(size) for size in options.sizes.split(",")], options.providers.split(",")
    if unknown := set(providers) - set(_PROVIDERS):
        sys.exit(f"unknown provider '{min(unknown)}': {', '.join(_PROVIDERS)} are known")
    if options.rank is not None:
        index, _, folder = options.rank.partition(":")
        measure_rank(int(index), options.ranks, Path(folder), sizes, providers)
        return
    if (count := torch.cuda.device_count()) < options.ranks:
        sys.exit(f"{options.ranks} ranks need as many GPUs, and this process can use {count}")
    copy = peer_copy_bandwidth()
    times = run_ranks(options.ranks, options.sizes, options.providers)
    given = {"ranks": options.ranks, "sizes": options.sizes, "providers": options.providers}
    report(__file__, options.json, given, figures(times, copy, options.ranks))


def figures(times: Times, copy: float, ranks: int) -> dict[str, Figure]:
    """Return the figures by name."""
    found = {"peer_copy": Figure(value=copy, unit="B/s", what="a large copy from one GPU to another, the best")}
    faster = 0  # the peer kernel is faster up to so many bytes
    for size, each in times.items():
        what = f"an all-reduce of {int(size)} bytes of bfloat16 by {ranks} GPUs in a graph"
        least = 2 * (ranks - 1) / ranks * int(size) / copy
        medians = {provider: statistics.median(seconds) for provider, seconds in each.items()}
        for provider, took in medians.items():
            name = f"all_reduce_{size}.{provider}"
            found[name] = Figure(value=took, unit="s", what=f"{what}, {provider}, the median")
            found[f"{name}.of_copy"] = Figure(value=least / took, unit="", what=f"{what}, {provider}: of the peer copy")
        if medians.keys() >= {"nccl", "peer"} and medians["peer"] < medians["nccl"]:
            faster = max(faster, int(size))
    if any("peer" in each for each in times.values()):
        found["peer.faster_to"] = Figure(value=faster, unit="B", what="the largest size at which peer beats NCCL")
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


def run_ranks(ranks: int, sizes: str, providers: str) -> Times:
    """Start a process for each rank, and return what rank 0 has measured."""
    given = ["--ranks", str(ranks), "--sizes", sizes, "--providers", providers]
    names = visible_gpus(torch.cuda.device_count(), os.environ.get(GPU_VARIABLE))
    with tempfile.TemporaryDirectory() as folder:
        for adds in (False, True) if set(providers.split(",")) - {"nccl"} else ():
            compile_peer(Path(folder) / str(adds), adds=adds)
        children = [
            subprocess.Popen(
                [sys.executable, __file__, *given, "--rank", f"{index}:{folder}"],
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
    found: Times = json.loads(text.splitlines()[-1])
    return found


def compile_peer(folder: Path, *, adds: bool) -> Executable:
    """Compile the peer kernel for this GPU into a new folder. `adds` says whether it adds a residual."""
    folder.mkdir()
    body = Program("call", "lowered", {"T": Dim("T", 1, 64)}, bucket=BucketClass(name="few", tokens=(1, 64)))
    x = body.add_input("in0", parse_type(_TYPE))
    total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
    if adds:
        residual = body.add_input("in1", parse_type(_TYPE))
        total = build.call(body, torch.ops.aten.add.Tensor, (residual, total), {})
    body.set_outputs({"out0": total})
    return Peer().emit(body, "all_reduce", Target.named("cuda"), folder)


def load_providers(
    providers: list[str], communicator: NcclCommunicator, folder: Path, index: int
) -> Mapping[str, tuple[Total, int]]:
    """Return the all-reduce of each provider, and the most bytes that it takes."""
    found: dict[str, tuple[Total, int]] = {"nccl": (communicator.total, sys.maxsize)}
    ranks = communicator.size
    rank = Rank(index, (("tp", index, ranks),))
    context = context_on("cuda", rank, {"tp": ranks}, {"tp": communicator})
    executable = Executable(id="all_reduce", backend="peer", inputs=(_TYPE,), outputs=(_TYPE,), files=())
    for adds, name in ((False, "peer"), (True, "peer_add")):
        if not {name, "nccl_add" if adds else name} & set(providers):
            continue
        call = load_peer(executable, folder / str(adds), context)
        if not isinstance(call, PeerAllReduce):
            sys.exit("the GPUs do not share memory; the warning above says why")
        call.most = call.largest
        if adds:
            found |= {
                "peer_add": (_with_residual(call), call.most),
                "nccl_add": (_with_residual(call.by_nccl), sys.maxsize),
            }
        else:
            found["peer"] = partial(_first, call), call.most
    return found


def _first(call: Callable[..., list[torch.Tensor]], *given: torch.Tensor) -> torch.Tensor:
    return call(*given)[0]


def _with_residual(call: Callable[..., list[torch.Tensor]]) -> Total:
    """Return a call with a residual of zeros, which is made at the first call of each size."""
    residuals: dict[int, torch.Tensor] = {}

    def total(x: torch.Tensor) -> torch.Tensor:
        if x.numel() not in residuals:
            residuals[x.numel()] = torch.zeros_like(x)
        return _first(call, x, residuals[x.numel()])

    return total


def measure_rank(index: int, ranks: int, folder: Path, sizes: list[int], providers: list[str]) -> None:
    """Run one rank's part of all measurements. Rank 0 prints the seconds of a call, by size and provider."""
    torch.cuda.init()
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        communicator = NcclCommunicator(folder, "benchmark", index, ranks)
        totals = load_providers(providers, communicator, folder, index)
        for size in sizes:
            fitting = {name: total for name, (total, most) in totals.items() if size <= most}
            _check_bits(fitting, size, index)
            found[str(size)] = {
                name: _seconds(total, size, ranks, stream) for name, total in fitting.items() if name in providers
            }
        stream.synchronize()
        communicator.check()
    if index == 0:
        print(json.dumps(found), flush=True)
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's threads need no end


def _check_bits(totals: Mapping[str, Total], size: int, index: int) -> None:
    """Exit if the sums of random values differ between providers."""
    draw = torch.Generator("cuda").manual_seed(size + index)
    x = torch.randn(size // 2, generator=draw, device="cuda").to(torch.bfloat16)
    sums = {name: total(x).view(torch.int16) for name, total in totals.items()}
    for name, found in sums.items():
        if not torch.equal(found, sums["nccl"]):
            sys.exit(f"the sums of {size} bytes differ in bits: {name} and nccl")


def _seconds(total: Total, size: int, ranks: int, stream: torch.cuda.Stream) -> list[float]:
    x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    total(x)  # connects
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    y = x
    for _ in range(_CALLS):
        y = total(y)
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
