"""Compare loading an artifact with reading its weights.

    python benchmarks/load.py [--gigabytes 1.0] [--threads 2] [--repeats 7]

It makes a checkpoint of that size with random weights and compiles it with the reference backend. Executables open in
the same way for every backend, and take milliseconds. It measures in turns, with a warm page cache:
read         read() of all weight files into one reused buffer of 1 MiB, one thread
read_whole   the same into one reused buffer as large as the largest file, which exceeds all CPU caches
read_bytes   Path.read_bytes() of every file into new memory, as a loader that keeps the weights there would
hash         reading and SHA-256 of every chunk with `threads` threads: the minimum for checking all digests
load         `load_artifact` in a process that has imported it: digests checked, weights mapped, states made
Only minima count: other work on the machine only adds to a time.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from random_checkpoint import config_of, layer_shapes, write_checkpoint
from results import Figure, print_figures, write_result

from ingot import compile_model
from ingot.ir.artifact.digest import digest_files
from ingot.runtime.loading.loader import load_artifact

_BLOCK_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights, in units of 10^9 bytes")
    parser.add_argument("--threads", type=int, default=2, help="threads that check digests")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-load-") as folder:
        artifact = _artifact(Path(folder), int(options.gigabytes * 1e9))
        figures = measure(artifact, options.threads, options.repeats)
    print_figures(figures)
    print(write_result(__file__, "load", vars(options), figures))


def measure(artifact: Path, threads: int, repeats: int) -> dict[str, Figure]:
    """Measure each way to read or load the weights of an artifact. Return the seconds as figures by name.

    `threads` is the number of threads. Each of `repeats` rounds times every way once, so that all ways see the same
    state of the machine.
    """
    files = sorted((artifact / "weights").glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    block, whole = bytearray(_BLOCK_BYTES), bytearray(max(file.stat().st_size for file in files))
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: _read(files, block),
        "read_whole": lambda: _read(files, whole),
        "read_bytes": lambda: [file.read_bytes() for file in files],
        "hash": lambda: digest_files(files, threads),
        "load": lambda: load_artifact(artifact, num_pages=1, threads=threads),
    }
    seconds = {name: math.inf for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return {
        "weights": Figure(value=size, unit="B", what="size of all weight files"),
        **{name: Figure(value=value, unit="s", what=f"{name}, the least") for name, value in seconds.items()},
        "load_per_read": _ratio(seconds, "load", "read"),
        "load_per_read_whole": _ratio(seconds, "load", "read_whole"),
        "load_per_read_bytes": _ratio(seconds, "load", "read_bytes"),
        "load_per_hash": _ratio(seconds, "load", "hash"),
    }


def _ratio(seconds: dict[str, float], over: str, under: str) -> Figure:
    return Figure(value=seconds[over] / seconds[under], unit="", what=f"{over} / {under}")


def _read(files: list[Path], buffer: bytearray) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _artifact(folder: Path, size: int) -> Path:
    """Compile an artifact into `folder` and return its path.

    It has about `size` bytes of random bfloat16 weights, in as many layers as needed.
    """
    config = config_of("1b", vocab_size=32000)
    embedding = config["vocab_size"] * config["hidden_size"]
    layers = max(1, round((size / 2 - embedding) / sum(map(math.prod, layer_shapes(config).values()))))
    checkpoint = write_checkpoint(folder / "checkpoint", {**config, "num_hidden_layers": layers})
    output = folder / "model.ingot"
    compile_model(checkpoint, output, backend="reference", max_batch=1, max_tokens=64, max_seq_len=2048)
    return output


if __name__ == "__main__":
    main()
