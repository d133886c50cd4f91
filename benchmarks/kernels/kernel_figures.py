"""Make figures of kernel times: compared with the minimum for their bytes and operations, and with other
implementations.

A figure is named PART.CALL.CONTENDER; contenders are the implementations that are compared. Its value is the median of
rounds in which all contenders took turns.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import benchmarks_path  # noqa: F401
from random_checkpoint import SHAPES
from results import Figure, add_json_option, write_result

Times = Mapping[str, Sequence[float]]  # seconds of each round, by contender
# The implementations, in words: Ingot's and the peers'.
CONTENDERS: Mapping[str, str] = {
    "triton": "Ingot, Triton",
    "fa2": "Ingot, FlashAttention-2",
    "fa3": "Ingot, FlashAttention-3",
    "cublas": "cuBLAS",
    "flashinfer": "FlashInfer",
    "latents": "Ingot, latents",
    "expanded": "Ingot, keys and values",
}


@dataclass(frozen=True)
class Peak:
    """The highest rates that this GPU reaches in simple programs. Kernels are compared with them.

    `copy` is the bytes per second of a plain copy, reads plus writes. `rate` is the operations per second of a large
    matmul. It is None if no measured kernel needs it.
    """

    copy: float
    rate: float | None = None

    def figures(self, part: str) -> dict[str, Figure]:
        copy = Figure(value=self.copy, unit="B/s", what="a plain copy, read and written, the best")
        found = {f"{part}.copy": copy}
        if self.rate is not None:
            what = "a large product of random bfloat16 matrices by cuBLAS, the best"
            found[f"{part}.rate"] = Figure(value=self.rate, unit="flop/s", what=what)
        return found


@dataclass(frozen=True)
class Call:
    """A kernel call to measure. `what` describes it for readers.

    `bytes` is the memory traffic that it cannot avoid. `flop` is the number of operations of its matmuls.
    """

    name: str
    what: str
    bytes: int
    flop: int = 0

    def least(self, peak: Peak) -> tuple[float, str]:
        """Return the minimum seconds of a call at the rates `peak`, and the rate that limits it.

        The second result is "of_copy" for memory, or "of_rate" for operations.
        """
        by_copy, by_rate = self.bytes / peak.copy, self.flop / peak.rate if peak.rate else 0.0
        return (by_copy, "of_copy") if by_copy >= by_rate else (by_rate, "of_rate")


def call_figures(
    part: str,
    call: Call,
    times: Times,
    peak: Peak,
    *,
    ours: str | None = None,
    peer: str | None = None,
) -> dict[str, Figure]:
    """Return the figures of one call by name. A figure is a number of a benchmark's result.

    `times` maps each implementation to its seconds in each round of measurement. If the implementations `ours` and
    `peer` were both measured, the figure `faster` is the time of `peer` divided by the time of `ours`. It also keeps
    the ratio of each round.
    """
    name = f"{part}.{call.name}"
    least, share = call.least(peak)
    found = {f"{name}.bytes": Figure(value=call.bytes, unit="B", what=f"{call.what}: bytes from memory")}
    if call.flop:
        found[f"{name}.flop"] = Figure(value=call.flop, unit="flop", what=f"{call.what}: operations of its products")
    medians = {contender: statistics.median(seconds) for contender, seconds in times.items()}
    words = {"of_copy": "of the copy's bandwidth", "of_rate": "of the large product's rate"}[share]
    for contender, took in medians.items():
        who = f"{call.what}: {CONTENDERS[contender]}"
        found[f"{name}.{contender}"] = Figure(value=took, unit="s", what=f"{who}, the median")
        found[f"{name}.{contender}.{share}"] = Figure(value=least / took, unit="", what=f"{who}, {words}")
    if ours in medians and peer in medians:
        what = f"{call.what}: {CONTENDERS[ours]}, faster than {CONTENDERS[peer]} by"
        rounds = tuple(round(other / own, 4) for own, other in zip(times[ours], times[peer], strict=True))
        found[f"{name}.faster"] = Figure(value=medians[peer] / medians[ours], unit="", what=what, values=rounds)
    return found


def measure_figures(
    part: str,
    work: Iterable[tuple[Call, Callable[[], Times]]],
    peak: Peak,
    seconds: float,
    *,
    ours: str | None = None,
    peer: str | None = None,
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Measure calls one after another. Return their figures by name, and a mapping from calls that failed to the
    reasons.

    `work` has each call with the function that measures it. A call fails if this function raises RuntimeError. After
    `seconds` no further call begins; the remaining calls count as failed. The figure `faster` compares the
    implementations `ours` and `peer`.
    """
    figures, missing = peak.figures(part), {}
    deadline = time.monotonic() + seconds
    for call, measure in work:
        try:
            if time.monotonic() > deadline:
                raise RuntimeError("no time was left for it")
            times = measure()
        except RuntimeError as error:
            missing[f"{part}.{call.name}"] = str(error)
            continue
        _print_times(call, times, peak)
        figures |= call_figures(part, call, times, peak, ours=ours, peer=peer)
    return figures, missing


def slug(text: str) -> str:
    """Return a text in the form that names of figures have: "1 x 64k, 31 x 2k" becomes "1_x_64k_31_x_2k"."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def kernel_parser(doc: str, seconds: float, shapes: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all kernel benchmarks have.

    `doc` is the description of the script. `seconds` is the default of --seconds, after which no further call is
    measured. `shapes` are the values of --shape, the default first; none: those of decoders.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes or SHAPES, default=shapes[0] if shapes else "8b")
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds after which no call begins")
    add_json_option(parser)
    return parser


def finish(script: str, options: argparse.Namespace, figures: Mapping[str, Figure], missing: Mapping[str, str]) -> None:
    """Print the calls that were not measured, with the reasons. With the option --json, write the result to that file.

    `script` is the `__file__` of the benchmark.
    """
    for name, reason in missing.items():
        print(f"{name} was not measured: {reason}")
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("shape", "only", "cache_dtype") if hasattr(options, name)}
        folder = options.json.parent
        print(write_result(script, options.json.stem, settings, figures, missing=missing, folder=folder))


def _print_times(call: Call, times: Times, peak: Peak) -> None:
    """Print the times of one call, a line for each implementation.

    A line has the median time, and the share of the GPU's highest rate that the call reaches.
    """
    least, share = call.least(peak)
    for contender, seconds in times.items():
        took = statistics.median(seconds)
        words = share.removeprefix("of_")
        print(
            f"{call.what:36} {CONTENDERS[contender]:24} {took * 1e6:9.2f} us {least / took:6.1%} of {words}", flush=True
        )
