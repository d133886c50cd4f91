"""Measure prefill attention on this GPU, and FlashInfer's if it is installed.

    python benchmarks/kernels/prefill.py [--shape 8b] [--seconds 40] [--work FOLDER [--build]] [--json FILE]

A step has chunks of prompts, and possibly a token of other sequences, through `paged_attention`. The pages of a
sequence are consecutive, as a pool allocates them for a prompt, or scattered if the name says so. Ingot's kernels are
compiled as for a model, into --work, where a later call finds them. FlashInfer runs through its own wrapper, without
its plan's time. A CUDA graph of each holds a sequence of calls with their own random numbers: four times the last-level
cache, or 32 calls. The graphs take turns. Result buffers begin as NaN, and the last result is compared with the
reference. Operations are those of the pairs of query and key: a multiplication with the key and one with the value.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import benchmarks_path  # noqa: F401
import flashinfer_peer
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, kernel_parser, measure_figures, slug
from prefill_builds import DTYPE, PAGE, Heads, Run, build_all, load_all
from random_checkpoint import SHAPES

from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import captured
from ingot.ir.ops import paged_attention

CACHES = 4  # multiple of the last-level cache that the calls of a graph read
CALLS = (2, 32)  # minimum and maximum calls of a graph
CHECKED = 256  # the last tokens of a sequence, which attend to all of its pages
# (tokens of the step, positions cached before) of each sequence.
STEPS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "1 x 128": ((128, 0),),
    "128 after 2000": ((128, 2000),),
    "1 x 1000": ((1000, 0),),
    "1 x 4000": ((4000, 0),),
    "1 x 8192": ((8192, 0),),
    "2048 after 30000": ((2048, 30000),),
    "8192 after 24000": ((8192, 24000),),
    "8 x 1000": ((1000, 0),) * 8,
    "16 x 512": ((512, 0),) * 16,
    "2048, 32 decode after 2000": ((2048, 0), *((1, 2000),) * 32),
    "4 x 448, 256 decode after 600": (*((448, 0),) * 4, *((1, 600),) * 256),
}
SCATTERED = ("8192 after 24000",)  # also measured over pages in a random order


@dataclass(frozen=True)
class Case:
    """A prefill step to measure.

    `sequences` has a pair for each sequence: its tokens in the step, and its positions cached before the step. The
    pages of a sequence are consecutive in the cache. With `scattered`, they are in random order.
    """

    name: str
    heads: Heads
    sequences: tuple[tuple[int, int], ...]
    scattered: bool = False

    @property
    def fed(self) -> list[int]:
        return [fed for fed, _ in self.sequences]

    @property
    def contexts(self) -> list[int]:
        return [fed + before for fed, before in self.sequences]

    @property
    def call(self) -> Call:
        """Return the name, bytes and operations of this attention call. Figures are computed from them.

        A query attends to all cached positions, to the earlier tokens of its chunk, and to itself. Each pair of query
        and key takes 2 x `dim` multiplications: with the key and with the value. The call reads q and each cached
        position once. Its result is as large as q.
        """
        pairs = sum(fed * before + fed * (fed + 1) // 2 for fed, before in self.sequences)
        elements = 2 * sum(self.fed) * self.heads.q + 2 * sum(self.contexts) * self.heads.kv
        flop = 4 * pairs * self.heads.q * self.heads.dim
        return Call(slug(self.name), self.name, elements * self.heads.dim * DTYPE.itemsize, flop)


class Step:
    """The tensors of one attention call: q, cache pages, page table and lengths. The numbers are random."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        heads, needed = case.heads, [-(-context // PAGE) for context in case.contexts]

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device, dtype=DTYPE)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=generator.device)

        self.case = case
        self.q, self.kv = randn(sum(case.fed), heads.q, heads.dim), randn(sum(needed), 2, PAGE, heads.kv, heads.dim)
        order = torch.arange(sum(needed), device=generator.device, dtype=torch.int32)
        if case.scattered:
            order = order[torch.randperm(sum(needed), generator=generator, device=generator.device)]
        self.table = torch.nn.utils.rnn.pad_sequence(list(order.split(needed)), batch_first=True)
        starts = [sum(case.fed[:place]) for place in range(len(case.fed))]
        self.lens = ints(starts), ints(case.fed), ints(case.contexts)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv, self.table, *self.lens

    @property
    def checked(self) -> list[int]:
        """Return the indices of the tokens that are compared with the reference: up to CHECKED last tokens of each
        sequence."""
        ends = zip(self.lens[0].tolist(), self.case.fed, strict=True)
        return [place for start, fed in ends for place in range(start + max(0, fed - CHECKED), start + fed)]

    @property
    def expected(self) -> torch.Tensor:
        """Return the right results for the compared tokens, computed by the reference implementation in float32."""
        count = self.lens[1].clamp(max=CHECKED)
        starts = (count.cumsum(0) - count).int()
        args = (self.q[self.checked].float(), self.kv.float(), self.table, starts, count, self.lens[2])
        result: torch.Tensor = paged_attention.reference(*args, scale=self.case.heads.dim**-0.5)
        return result


def ours(run: Run, steps: list[Step]) -> Recorded:
    """Capture a CUDA graph that calls `run`, one of Ingot's kernels, once for each of `steps`.

    Raises RuntimeError for wrong results.
    """
    run(*steps[-1].inputs)  # run the setup of a first call outside the recording
    results: list[torch.Tensor] = []
    graph = captured(partial(lambda step: results.append(run(*step.inputs)[0]), step) for step in steps)
    return check(Recorded(graph, len(steps), (run, steps, results)), results[-1], steps[-1].expected, steps[-1].checked)


def flashinfers(steps: list[Step]) -> Recorded:
    """Capture a CUDA graph that calls FlashInfer's wrapper once for each of `steps`.

    Raises RuntimeError for wrong results.
    """
    scratch, case = flashinfer_peer.workspace(steps[0].q.device), steps[0].case
    made = [
        flashinfer_peer.prefill_call(scratch, step.q, step.kv, step.table, case.fed, case.contexts) for step in steps
    ]
    made[-1][0]()
    recorded = Recorded(captured(launch for launch, _ in made), len(made), (scratch, steps, made))
    return check(recorded, made[-1][1], steps[-1].expected, steps[-1].checked)


def measure(case: Case, runs: Mapping[str, Run], peer: bool, cache: int) -> dict[str, list[float]]:
    """Return the seconds of one attention call in each round of measurement, by implementation.

    `runs` maps names to Ingot's kernels. With `peer`, FlashInfer is measured too. `cache` is the size of the GPU's
    last-level cache in bytes. Raises RuntimeError for wrong results.
    """
    generator = torch.Generator(device.DEVICE).manual_seed(1)
    least, most = CALLS
    count = max(least, min(most, math.ceil(CACHES * cache / case.call.bytes)))
    steps = [Step(case, generator) for _ in range(count)]
    recorded = {contender: ours(run, steps) for contender, run in runs.items()}
    return take_turns({**recorded, **({"flashinfer": flashinfers(steps)} if peer else {})})


def cases(heads: Heads) -> Iterator[Case]:
    yield from (Case(name, heads, sequences) for name, sequences in STEPS.items())
    yield from (Case(f"{name}, scattered pages", heads, STEPS[name], scattered=True) for name in SCATTERED)


def main() -> None:
    parser = kernel_parser(__doc__ or "", 40.0)
    parser.add_argument("--work", type=Path, help="folder for compiled kernels; by default a temporary one")
    parser.add_argument("--build", action="store_true", help="compile, and measure nothing")
    options = parser.parse_args()
    heads, machine = Heads.of(SHAPES[options.shape]), this_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.work or Path(temporary)) / options.shape
        build_all(heads, machine.sm, folder)
        if options.build:
            return
        runs, refusals = load_all(machine.sm, folder)
        peak = Peak(copy_bandwidth("cuda"), product_rate())
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        peer = flashinfer_peer.installed()
        work = ((case.call, partial(measure, case, runs, peer, cache)) for case in cases(heads))
        chosen = next(iter(runs))  # the one that a compiled model uses
        figures, missing = measure_figures("prefill", work, peak, options.seconds, ours=chosen, peer="flashinfer")
    missing |= {f"prefill.{contender}": reason for contender, reason in refusals.items()}
    missing |= flashinfer_peer.missing("prefill")
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
