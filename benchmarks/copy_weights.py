"""Measure how fast an artifact's weights reach the device, by threads, and compare with the limits of the host.

    python benchmarks/copy_weights.py ARTIFACT [--device cuda] [--threads 4,8,16] [--repeats 3] [--json FILE]

The page cache holds the files, and the device has been initialized. For each number of threads:
copy     `WeightCopy`, which a start on a GPU waits for: reading, SHA-256 and copying, each byte once
nohash   the same without SHA-256
hash     only reading and SHA-256, into reused memory
read     only reading, in the blocks of `WeightCopy`
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from results import Figure, add_json_option, report

from ingot.bench.startup import read_files
from ingot.ir.artifact.digest import digest_files
from ingot.runtime.cuda.weights import BLOCK_BYTES, WeightCopy
from ingot.runtime.loading.artifact import Artifact, open_artifact
from ingot.runtime.loading.load_context import on_one_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", default="4,8,16", help="numbers of threads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    read_files(options.artifact)
    torch.empty(1, device=options.device)
    artifact = open_artifact(options.artifact)
    counts = [int(count) for count in options.threads.split(",")]
    figures: dict[str, Figure] = {}
    for count in counts:
        figures |= measure(artifact, torch.device(options.device), count, options.repeats)
    settings = {name: getattr(options, name) for name in ("device", "threads", "repeats")}
    report(__file__, options.json, {"artifact": options.artifact.name, **settings}, figures)


def measure(artifact: Artifact, device: torch.device, threads: int, repeats: int) -> dict[str, Figure]:
    """Measure several ways to read, digest or copy an artifact's weights. Return bytes per second as figures by name.

    Each way uses `threads` threads and runs `repeats` times. The best run counts. Weights are copied to `device`.
    """
    context = on_one_device(device.type)
    files = [artifact.file(relpath) for relpath in artifact.weight_files()]
    size = sum(file.stat().st_size for file in files)
    ways: dict[str, tuple[str, Callable[[], object]]] = {
        "copy": ("read, digested and copied", lambda: WeightCopy(artifact, context, threads=threads).run()),
        "nohash": ("read and copied", lambda: WeightCopy(artifact, context, threads=threads, verify=False).run()),
        "hash": ("read and digested", lambda: digest_files(files, threads)),
        "read": ("read", lambda: _read(files, threads)),
    }
    return {
        f"{name}_{threads}": Figure(value=size / _seconds(way, repeats), unit="B/s", what=f"{what}, {threads} threads")
        for name, (what, way) in ways.items()
    }


def _seconds(way: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        begin = time.perf_counter()
        kept = way()
        seconds = time.perf_counter() - begin
        del kept
        return seconds

    return min(once() for _ in range(repeats))


def _read(files: list[Path], threads: int) -> None:
    def blocks() -> Iterator[tuple[Path, int]]:
        for file in files:
            for begin in range(0, file.stat().st_size, 8 * BLOCK_BYTES):
                yield file, begin

    def read(place: tuple[Path, int]) -> None:
        buffer = bytearray(BLOCK_BYTES)
        with place[0].open("rb", buffering=0) as file:
            for begin in range(place[1], place[1] + 8 * BLOCK_BYTES, BLOCK_BYTES):
                os.preadv(file.fileno(), [buffer], begin)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, blocks()))


if __name__ == "__main__":
    main()
