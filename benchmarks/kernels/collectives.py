"""Measure the all-reduce of two or more GPUs by size, inside a CUDA graph, and the bandwidth of a copy between GPUs.

    python benchmarks/kernels/collectives.py [--ranks 2] [--sizes 8192,65536,…] [--providers nccl,peer] [--sweep]
                                             [--json FILE]

Each rank is a process with one GPU, connected as the ranks of a mesh are. A graph holds a chain of all-reduces: each
reads the result of the one before. A figure is the median of several replays by the clock of rank 0's GPU, divided by
the number of calls. Values begin as ones, so each result is known, and the last one is checked. A bandwidth is the
bytes that a rank must send and receive, over the time.

The provider peer is the kernel of the backend of that name for few bytes, and push the one of two ranks for many. Each
computes all sizes that it can, so also those for which backends/peer/sizes.py chooses another one. Their sums of random
values must have the bits of NCCL's. The providers nccl_add, peer_add and push_add add a residual too: by a kernel after
NCCL's, and in the same launch. The residual is zero while they are timed.

With --sweep, providers are also the variants in push_variants.py, such as push_16384x2x8 and push_add_16384x2x8: chunks
of 16384 bytes, two programs on a multiprocessor, and eight warps. Their order by time is printed for each size. The
other providers are then nccl, push, nccl_add and push_add, unless they are given.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import torch
from push_variants import compile_variants, load_variants, variants_bytes
from results import Figure, add_json_option, report

from ingot.backends.nccl.communicator import NcclCommunicator
from ingot.backends.peer import prepared
from ingot.backends.peer.emit import Peer
from ingot.backends.peer.layout import PUSH_RANKS
from ingot.backends.peer.load import PeerAllReduce, shared_memory
from ingot.backends.peer.load import load as load_peer
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.machine.gpus import GPU_VARIABLE, visible_gpus
from ingot.ir.machine.meeting import MeetingPlace
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
_PROVIDERS = ("nccl", "peer", "push", "nccl_add", "peer_add", "push_add")
_PUSHES = {"push", "push_add"}  # of two ranks
_TYPE = "bf16[T, 8]"  # of the compiled call; the kernels take any number of vectors
_TOKENS = 1 << 16  # of the largest step of the compiled call: 1 MiB, so there is a kernel for many bytes
_WAIT_MICROSECONDS = 30_000_000  # of a kernel for another rank: a fault ends the run soon

# By size in bytes and provider: the seconds of a call in each replay.
Times = Mapping[str, Mapping[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="the number of GPUs")
    parser.add_argument("--sizes", default=_SIZES, help="bytes of a rank's values, separated by commas")
    parser.add_argument("--providers", help="of the all-reduce, separated by commas; otherwise all that there are")
    parser.add_argument("--sweep", action="store_true", help="measure the variants of the kernel that pushes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # of a child: its index and the folder to meet in
    add_json_option(parser)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    providers = chosen_providers(options.providers, options.ranks, sweep=options.sweep)
    if options.rank is not None:
        index, _, folder = options.rank.partition(":")
        measure_rank(int(index), options.ranks, Path(folder), sizes, providers, sweep=options.sweep)
        return
    if (count := torch.cuda.device_count()) < options.ranks:
        sys.exit(f"{options.ranks} ranks need as many GPUs, and this process can use {count}")
    copy = peer_copy_bandwidth()
    times = run_ranks(options.ranks, options.sizes, providers, sweep=options.sweep)
    given = {"ranks": options.ranks, "sizes": options.sizes, "providers": ",".join(providers), "sweep": options.sweep}
    report(__file__, options.json, given, figures(times, copy, options.ranks))
    if options.sweep:
        print(*order(times), sep="\n")


def chosen_providers(given: str | None, ranks: int, *, sweep: bool) -> list[str]:
    """Return the names of the providers besides the variants. Exits with a message if one is not there."""
    if ranks != PUSH_RANKS and (sweep or _PUSHES & {*(given or "").split(",")}):
        sys.exit(f"the kernel that pushes is for {PUSH_RANKS} ranks, and these are {ranks}")
    if given is None:
        left_out = {"peer", "peer_add"} if sweep else () if ranks == PUSH_RANKS else _PUSHES
        return [name for name in _PROVIDERS if name not in left_out]
    providers = given.split(",")
    if unknown := set(providers) - set(_PROVIDERS):
        sys.exit(f"unknown provider '{min(unknown)}': {', '.join(_PROVIDERS)} are known")
    return providers


def order(times: Times) -> list[str]:
    """Return lines of text: for each size the providers by their median times, first those without a residual."""
    lines = []
    for size, each in times.items():
        for adds in (False, True):
            medians = {name: statistics.median(took) for name, took in each.items() if ("_add" in name) is adds}
            lines.append(f"{size} bytes{' and a residual' if adds else ''}:")
            by_time = sorted(medians.items(), key=lambda one: one[1])
            lines += [f"  {took * 1e6:8.2f} us  {name}" for name, took in by_time]
    return lines


def figures(times: Times, copy: float, ranks: int) -> dict[str, Figure]:
    """Return the figures by name."""
    found = {"peer_copy": Figure(value=copy, unit="B/s", what="a large copy from one GPU to another, the best")}
    faster = 0  # the peer kernel is faster up to so many bytes
    beaten = 0  # the kernel that pushes is slower than another one up to so many bytes
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
        if "push" in medians and medians["push"] > min(medians.get(name, 1.0) for name in ("nccl", "peer")):
            beaten = max(beaten, int(size))
    if any("push" in each for each in times.values()):
        what = "the largest size at which nccl or peer beats push"
        found["push.slower_to"] = Figure(value=beaten, unit="B", what=what)
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


def run_ranks(ranks: int, sizes: str, providers: Sequence[str], *, sweep: bool) -> Times:
    """Start a process for each rank, and return what rank 0 has measured."""
    given = ["--ranks", str(ranks), "--sizes", sizes, "--providers", ",".join(providers), *["--sweep"] * sweep]
    names = visible_gpus(torch.cuda.device_count(), os.environ.get(GPU_VARIABLE))
    with tempfile.TemporaryDirectory() as folder:
        for adds in (False, True) if sweep or set(providers) - {"nccl"} else ():
            compile_peer(Path(folder) / str(adds), adds=adds)
        if sweep:
            compile_variants(Path(folder), Target.named("cuda"))
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
    """Compile the peer kernels for this GPU into a new folder. `adds` says whether they add a residual."""
    folder.mkdir()
    bucket = BucketClass(name="many", tokens=(1, _TOKENS))
    body = Program("call", "lowered", {"T": Dim("T", 1, _TOKENS)}, bucket=bucket)
    x = body.add_input("in0", parse_type(_TYPE))
    total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
    if adds:
        residual = body.add_input("in1", parse_type(_TYPE))
        total = build.call(body, torch.ops.aten.add.Tensor, (residual, total), {})
    body.set_outputs({"out0": total})
    return Peer().emit(body, "all_reduce", Target.named("cuda"), folder)


class Total:
    """An all-reduce of a provider, and of a residual of zeros with `adds`, which is made at the first call of a size.

    call   takes x, and the residual with `adds`, and returns a list with the sum
    most   the most bytes of x
    """

    def __init__(self, call: Callable[..., list[torch.Tensor]], most: int = sys.maxsize, *, adds: bool = False) -> None:
        self.most, self.adds = most, adds
        self._call = call
        self._residuals: dict[int, torch.Tensor] = {}

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() not in self._residuals:
            self._residuals[x.numel()] = torch.zeros_like(x)
        return self._residuals[x.numel()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x, self.residual(x))[0] if self.adds else self._call(x)[0]


def load_providers(
    providers: Sequence[str], communicator: NcclCommunicator, folder: Path, index: int, *, sweep: bool
) -> Mapping[str, Total]:
    """Return the all-reduce of each provider, and those of NCCL with which the sums of others are compared."""
    found = {"nccl": Total(lambda x: [communicator.total(x)])}
    ranks = communicator.size
    rank = Rank(index, (("tp", index, ranks),))
    context = context_on("cuda", rank, {"tp": ranks}, {"tp": communicator})
    cores = torch.cuda.get_device_properties(context.device).multi_processor_count
    if sweep:  # before a call is loaded, which would share less memory
        peers = shared_memory(communicator, context.device, variants_bytes(cores))
    executable = Executable(id="all_reduce", backend="peer", inputs=(_TYPE,), outputs=(_TYPE,), files=())
    for adds in (False, True):
        few, many = ("peer_add", "push_add") if adds else ("peer", "push")
        if not sweep and not {few, many, "nccl_add" if adds else few} & set(providers):
            continue
        for name in (few, many):
            call = load_peer(executable, folder / str(adds), context)
            if not isinstance(call, PeerAllReduce):
                sys.exit("the GPUs do not share memory; the warning above says why")
            if name == few:
                call.most = call.largest
                found[name] = Total(call, call.largest, adds=adds)
            elif name in providers:
                if not call.pushed:
                    sys.exit("the kernel that pushes cannot run; the warning above says why")
                call.most = 0
                found[name] = Total(call, call.pushed, adds=adds)
        if adds:
            found["nccl_add"] = Total(call.by_nccl, adds=True)
    if sweep:
        assert peers is not None
        found |= {name: Total(call, adds="_add" in name) for name, call in load_variants(folder, peers, cores).items()}
    return found


def measure_rank(
    index: int, ranks: int, folder: Path, sizes: list[int], providers: Sequence[str], *, sweep: bool
) -> None:
    """Run one rank's part of all measurements. Rank 0 prints the seconds of a call, by size and provider."""
    torch.cuda.init()
    prepared.TIMEOUT_MICROSECONDS = _WAIT_MICROSECONDS
    stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        communicator = NcclCommunicator(MeetingPlace(folder), "benchmark", index, ranks)
        totals = load_providers(providers, communicator, folder, index, sweep=sweep)
        one = torch.ones(8, dtype=torch.bfloat16, device="cuda")
        for size in sizes:
            fitting = {name: total for name, total in totals.items() if size <= total.most}
            _check_bits(fitting, size, index, communicator)
            found[str(size)] = {}
            for name, total in fitting.items():
                if name not in providers and name in _PROVIDERS:
                    continue
                communicator.total(one)  # all ranks have ended the calls of the provider before
                found[str(size)][name] = _seconds(total, size, ranks, stream, communicator)
    if index == 0:
        print(json.dumps(found), flush=True)
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's threads need no end


def _check_bits(totals: Mapping[str, Total], size: int, index: int, communicator: NcclCommunicator) -> None:
    """Exit if the sums of random values, and of a random residual, differ between providers."""
    draw = torch.Generator("cuda").manual_seed(size + index)
    x = torch.randn(size // 2, generator=draw, device="cuda").to(torch.bfloat16)
    residual = torch.randn(size // 2, generator=draw, device="cuda").to(torch.bfloat16)
    sums = {}
    for name, total in totals.items():
        communicator.total(x[:8])  # all ranks have ended the calls of the provider before
        if total.adds:
            total.residual(x).copy_(residual)
        sums[name] = total(x).view(torch.int16)
        if total.adds:
            total.residual(x).zero_()
    torch.cuda.synchronize()
    communicator.check()
    for name, found in sums.items():
        by_nccl = "nccl_add" if totals[name].adds else "nccl"
        if not torch.equal(found, sums[by_nccl]):
            sys.exit(f"the sums of {size} bytes differ in bits: {name} and {by_nccl}")


def _seconds(
    total: Total, size: int, ranks: int, stream: torch.cuda.Stream, communicator: NcclCommunicator
) -> list[float]:
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
        communicator.check()
    # Each call multiplies the ones by the number of ranks: exact in bfloat16 for a power of two.
    expected = torch.tensor(float(ranks) ** _CALLS, dtype=torch.bfloat16)
    if ranks in (2, 4, 8) and not bool((y == expected.item()).all()):
        sys.exit(f"the sum of {size} bytes is wrong: {y[0].item()} for {expected.item()}")
    return times[3:]


if __name__ == "__main__":
    main()
