"""Tile sizes of the kernels of linear, tried on this GPU: how near to the memory's bandwidth each comes.

    python benchmarks/kernels/tune_linear.py [--out tune_linear.json] [--seconds 120] [--tokens 1,32,8,64]

Times the products of three decoders' layers as a step calls them, with the norm, gate or residual that a region has
around them. A CUDA graph holds a row of launches, each of which may begin before the one in front has ended, over
weights that lie far apart in 3 GB, so that no cache holds any. Bytes are those of the weights. The fraction is of a
copy in the same run, read and write together. Kernels are compiled in other processes, ahead of the measurements. At
the end whole stacks of layers run, with a pause in place of attention, and each product in turn takes those of its best
sizes that serve the stack best: there a kernel also has to leave room for the next one, which loads its first weights
meanwhile.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.linear import Gate, Linear, Norm, padded_tokens, schedule_linear
from ingot.backends.triton.lower.linear_choice import matvec_tiles, tiles
from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Product, Tiles
from ingot.backends.triton.schedule import KernelLaunch, Schedule, Value
from ingot.ir.plan import BucketClass
from ingot.ir.types import DTYPE_NAMES, DTYPES, TensorType

DEVICE = "cuda"
DTYPE = torch.bfloat16
EPS = 1e-5
POOL = 3 << 30  # bytes of weights that the launches go over: fifty times the last-level cache of an H200
TRAFFIC = 1 << 31  # bytes that a graph reads at least: half a millisecond, against some microseconds of its launch
PAUSE = 4000  # nanoseconds
MOST_LAUNCHES = 128  # in a graph: to record one takes longer than to run it
SHARED_MEMORY = 227 << 10  # of a block on compute capability 9.0 (CUDA C++ programming guide, table of capabilities)
SM, CORES = 90, 132
_KEPT = 8  # of the best tiles for one number of tokens are tried for another
BUCKETS = {1: (1, 1), 8: (2, 16), 32: (17, 32), 64: (33, 64)}


@dataclass(frozen=True)
class Part:
    """A product of a layer: its sizes, and what stands around it."""

    name: str
    columns: int
    depth: int
    gated: bool = False
    norm: bool = False
    residual: bool = False
    logits: bool = False

    @property
    def bytes(self) -> int:
        return self.columns * (2 if self.gated else 1) * self.depth * DTYPE.itemsize


@dataclass(frozen=True)
class Decoder:
    """The shapes of a decoder's step."""

    name: str
    layers: int
    hidden: int
    qkv: int
    heads: int  # all of them together
    ffn: int
    vocab: int

    def layer(self) -> tuple[Part, ...]:
        return (
            Part("qkv", self.qkv, self.hidden, norm=True),
            Part("o", self.hidden, self.heads, residual=True),
            Part("gate_up", self.ffn, self.hidden, gated=True, norm=True),
            Part("down", self.hidden, self.ffn, residual=True),
        )

    def head(self) -> Part:
        return Part("head", self.vocab, self.hidden, norm=True, logits=True)


# Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, by their config.json.
DECODERS = (
    Decoder("8b", 32, 4096, 6144, 4096, 14336, 128256),
    Decoder("1b", 16, 2048, 3072, 2048, 8192, 128256),
    Decoder("0.6b", 28, 1024, 4096, 2048, 3072, 151936),
)
Chosen = MatvecTiles | Tiles
Job = tuple[str, Part, Chosen]  # with the decoder's name


@dataclass(frozen=True)
class Found:
    """One measurement: what a launch took, and the share of a copy's bandwidth at which it read its weights."""

    decoder: str
    part: Part
    tokens: int
    chosen: Chosen
    microseconds: float
    fraction: float

    def row(self) -> dict[str, Any]:
        part = self.part
        return {
            "decoder": self.decoder,
            "part": part.name,
            **_sizes(part, self.tokens, self.chosen),
            "microseconds": round(self.microseconds, 2),
            "gb_per_second": round(part.bytes / self.microseconds / 1e3),
            "fraction": round(self.fraction, 4),
        }


def _sizes(part: Part, tokens: int, chosen: Chosen) -> dict[str, Any]:
    return {"columns": part.columns, "depth": part.depth, "gated": part.gated, "tokens": tokens, **asdict(chosen)}


def make_schedule(part: Part, tokens: int, chosen: Chosen | None) -> tuple[Schedule, Value]:
    """Inputs in order: x, weight, gain, residual."""
    schedule = Schedule(SM, CORES, BucketClass(name="tuning", tokens=BUCKETS[tokens]), dependent=True)
    rows = part.columns * (2 if part.gated else 1)
    linear = Linear(
        Value(TensorType(DTYPE, ("T", part.depth)), input=0),
        Value(TensorType(DTYPE, (rows, part.depth)), input=1),
        None,
        TensorType(torch.float32 if part.logits else DTYPE, ("T", part.columns)),
        norm=Norm(Value(TensorType(DTYPE, (part.depth,)), input=2), EPS) if part.norm else None,
        gate=Gate("silu", 0, part.columns) if part.gated else None,
        residual=Value(TensorType(DTYPE, ("T", part.columns)), input=3) if part.residual else None,
    )
    return schedule, schedule_linear(linear, schedule, chosen)


def candidates(part: Part, tokens: int) -> list[Chosen]:
    found = _matvec_candidates(part) if tokens == 1 else _tile_candidates(part, padded_tokens(tokens))
    return list(dict.fromkeys(found))


def _matvec_candidates(part: Part) -> Iterator[MatvecTiles]:
    """Tiles that leave each thread 64 to 256 bytes of weights to hold, of 128 registers that four blocks leave it."""
    parts = 2 if part.gated else 1
    for block_k in (512, 1024, 2048, 4096):
        for warps in (4, 8):
            for held in (64, 128, 256):
                block_n = held * 32 * warps // (block_k * DTYPE.itemsize * parts)
                if block_k <= part.depth and 1 <= block_n <= 32:
                    yield MatvecTiles(block_n, block_k, warps)


def _tile_candidates(part: Part, tokens: int) -> Iterator[Tiles]:
    """Tiles that give each multiprocessor up to two programs, with room for one or two in its shared memory."""
    for block_n, splits, block_k, programs in product((16, 32, 64, 128), (1, 2, 4, 8), (128, 256), (1, 2)):
        blocks = -(-part.columns // block_n)
        crowded = blocks * splits > 2 * CORES
        if ((splits > 1 or block_n < 64) and crowded) or (block_n == 128 and part.gated):
            continue  # nothing gained: smaller tiles and more splits read x, or write sums, more often
        if blocks * splits < CORES // 3:
            continue
        stages = stages_that_fit(part, tokens, block_n, block_k, splits, programs)
        if stages < 2 or part.depth < splits * block_k:
            continue
        for lines in (0, 16):
            yield Tiles(block_n, block_k, splits, 4, stages, lines)


def stages_that_fit(part: Part, tokens: int, block_n: int, block_k: int, splits: int, programs: int) -> int:
    """Blocks on the way at once: as many as a program has, 8 at most, and what its share of shared memory holds."""
    block = (block_n * (2 if part.gated else 1) + tokens) * block_k * DTYPE.itemsize
    steps = -(-part.depth // (splits * block_k))
    return min(8, steps + 1, (SHARED_MEMORY // programs - 4096) // block)


def more_candidates(part: Part, tokens: int, chosen: Chosen) -> list[Chosen]:
    """The best tiles so far, with more or less of the weights fetched ahead into the cache, or by more threads."""
    more: list[Chosen] = [replace(chosen, lines=lines) for lines in (0, 4, 8, 32)]
    return [*more, replace(chosen, warps=12 - chosen.warps)] if tokens > 1 else more


def for_other_tokens(part: Part, tokens: int, chosen: Tiles) -> Tiles:
    """The same tiles with as many stages as fit with more tokens."""
    most = stages_that_fit(part, padded_tokens(tokens), chosen.block_n, chosen.block_k, chosen.splits, 1)
    return replace(chosen, stages=min(chosen.stages, most))


def compile_all(part: Part, tokens: int, chosen: Chosen) -> None:
    """Fill Triton's cache on disk with the kernels of a measurement, without touching the GPU."""
    for launch in make_schedule(part, tokens, chosen)[0].launches:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}  # an entry for each parameter: so the cache has them
        for place, name in enumerate(launch.kernel.arg_names):
            value = launch.arguments.get(name)
            aligned = isinstance(value, Value) or (value is not None and tokens % 16 == 0)
            attributes[(place,)] = [["tt.divisibility", 16]] if aligned else []
            if isinstance(value, Value):
                signature[name] = "*" + {"bf16": "bf16", "f32": "fp32", "i32": "i32"}[DTYPE_NAMES[value.type.dtype]]
            elif value is None:
                signature[name] = "constexpr"
                constants[name] = launch.constants.get(name)
            else:
                signature[name] = "i32"
        source = ASTSource(launch.kernel, signature, constants, attributes)
        triton.compile(source, target=GPUTarget("cuda", SM, 32), options=_options(launch))


def _options(launch: KernelLaunch) -> dict[str, Any]:
    return {"num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": launch.dependent}


class Call:
    """A product with its buffers, to be launched on weights anywhere in the pool."""

    def __init__(self, part: Part, tokens: int, chosen: Chosen | None) -> None:
        self.part, self.sizes = part, {"T": tokens}
        self.schedule, self.result = make_schedule(part, tokens, chosen)
        self.buffers = {
            name: torch.zeros(
                [evaluate(size, self.sizes) for size in buffer.shape], dtype=DTYPES[buffer.dtype], device=DEVICE
            )
            for name, buffer in self.schedule.buffers.items()
        }

    @property
    def output(self) -> torch.Tensor:
        return self.buffers[str(self.result.buffer)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        for launch in self.schedule.launches:
            arguments = {name: self._argument(value, inputs) for name, value in launch.arguments.items()}
            grid = tuple(evaluate(size, self.sizes) for size in launch.grid)
            launch.kernel[grid](**arguments, **launch.constants, **_options(launch))

    def _argument(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, Value):
            return inputs[value.input] if value.input is not None else self.buffers[str(value.buffer)]
        return None if value is None else evaluate(value, self.sizes)


class Bench:
    """The pool of weights, and the times of graphs over it."""

    def __init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        count = POOL // DTYPE.itemsize
        self.pool = torch.empty(count, dtype=DTYPE, device=DEVICE)
        for begin in range(0, count, 1 << 28):
            self.pool[begin : begin + (1 << 28)].normal_(generator=generator).mul_(0.02)
        self.vectors = torch.randn(64, 1 << 18, generator=generator, device=DEVICE).to(DTYPE)
        self.place = 0
        half = count // 2
        seconds = self.seconds(lambda: self.pool[:half].copy_(self.pool[half : 2 * half]))
        self.copy = 2 * half * DTYPE.itemsize / seconds

    def weight(self, part: Part) -> torch.Tensor:
        """The next stretch of the pool as a weight."""
        rows = part.columns * (2 if part.gated else 1)
        count = rows * part.depth
        if self.place + count > self.pool.numel():
            self.place = 0
        weight = self.pool[self.place : self.place + count].view(rows, part.depth)
        self.place += count
        return weight

    def inputs(self, part: Part, tokens: int) -> list[torch.Tensor]:
        def matrix(size: int) -> torch.Tensor:
            return self.vectors.flatten()[: tokens * size].view(tokens, size)

        return [matrix(part.depth), self.weight(part), self.vectors[1, : part.depth], matrix(part.columns)]

    def seconds(self, work: Callable[[], object], rounds: int = 6) -> float:
        """The least time of `work`, by events of the device."""
        work()
        times: list[float] = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3)
        return min(times)

    def graph_seconds(self, launches: Iterable[Callable[[], None]]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        return self.seconds(graph.replay)

    def measure(self, decoder: str, part: Part, tokens: int, chosen: Chosen) -> Found:
        """Raises RuntimeError for wrong results, and what Triton raises for tiles that do not fit."""
        call = Call(part, tokens, chosen)
        inputs = self.inputs(part, tokens)
        call(inputs)
        _check(call, inputs)
        count = min(MOST_LAUNCHES, max(4, TRAFFIC // part.bytes))
        seconds = self.graph_seconds(partial(call, self.inputs(part, tokens)) for _ in range(count)) / count
        return Found(decoder, part, tokens, chosen, seconds * 1e6, part.bytes / seconds / self.copy)


def _check(call: Call, inputs: Sequence[torch.Tensor]) -> None:
    """The first columns against the same in float32."""
    part = call.part
    x, weight, gain, residual = (value.float() for value in (inputs[0], inputs[1][:256], inputs[2], inputs[3]))
    if part.norm:
        x = ((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(DTYPE).float() * gain).to(DTYPE).float()
    expected = x @ weight.T
    if part.gated:
        up = inputs[1][part.columns : part.columns + 256].float()
        expected = torch.nn.functional.silu(expected) * (x @ up.T)
    if part.residual:
        expected += residual[:, :256]
    found = call.output[:, :256].float()
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-2:  # bf16 rounds by 2e-3
        raise RuntimeError(f"the result is wrong by {error}")


def tune(
    bench: Bench, pool: ProcessPoolExecutor, tokens: int, earlier: Sequence[Found], deadline: float
) -> list[Found]:
    """Measurements of all parts for steps of `tokens`: of all candidates, or, where there are `earlier` ones for
    another number of tokens, of those that did best there."""
    jobs: list[list[Job]] = []
    for decoder in DECODERS:
        for part in (*decoder.layer(), decoder.head()):
            known = sorted((one for one in earlier if one.part == part), key=_time)
            kept = [one.chosen for one in known[:_KEPT] if isinstance(one.chosen, Tiles)]
            tried = [for_other_tokens(part, tokens, chosen) for chosen in kept] or candidates(part, tokens)
            first = best_known(part, tokens)
            jobs.append([(decoder.name, part, chosen) for chosen in dict.fromkeys([first, *tried])])
    in_turns = [job for turn in zip_longest(*jobs) for job in turn if job is not None]  # the deadline hits all alike
    now = time.monotonic()
    found = _measure_all(bench, pool, tokens, in_turns, now + 0.75 * (deadline - now))
    more = [
        (one.decoder, one.part, chosen)
        for one in best_of(found)
        for chosen in more_candidates(one.part, tokens, one.chosen)
    ]
    return found + _measure_all(bench, pool, tokens, more, deadline)


def best_known(part: Part, tokens: int) -> Chosen:
    """What the lowering takes by itself."""
    shape = Product(part.columns, part.depth, part.gated, DTYPE)
    return matvec_tiles(shape) if tokens == 1 else tiles(shape, padded_tokens(tokens), SM)


def _measure_all(
    bench: Bench, pool: ProcessPoolExecutor, tokens: int, jobs: Sequence[Job], deadline: float
) -> list[Found]:
    """In the order in which the kernels come out of the compiler; what is left at the deadline is left out."""
    found: list[Found] = []
    compiled = {pool.submit(compile_all, part, tokens, chosen): (name, part, chosen) for name, part, chosen in jobs}
    try:
        for future in as_completed(compiled, timeout=max(1.0, deadline - time.monotonic())):
            name, part, chosen = compiled[future]
            try:
                future.result()
                found.append(bench.measure(name, part, tokens, chosen))
            except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                print(f"{name} {part.name}, {tokens} tokens, {chosen}: {error}"[:300])
            if time.monotonic() > deadline:
                raise TimeoutError
    except TimeoutError:
        print(f"out of time: {len(found)} of {len(jobs)} measured for {tokens} tokens")
        for future in compiled:
            future.cancel()
    return found


def best_of(found: Sequence[Found]) -> list[Found]:
    """The fastest for each part and number of tokens, in the order of the parts."""
    best: dict[tuple[str, Part, int], Found] = {}
    for one in sorted(found, key=_time):
        best.setdefault((one.decoder, one.part, one.tokens), one)
    names = [decoder.name for decoder in DECODERS]
    parts = ["qkv", "o", "gate_up", "down", "head"]
    return sorted(best.values(), key=lambda one: (one.tokens, names.index(one.decoder), parts.index(one.part.name)))


def _time(found: Found) -> float:
    return found.microseconds


class Stack:
    """All products of a decoder's step in a row, with a pause where attention runs."""

    def __init__(self, bench: Bench, decoder: Decoder, tokens: int) -> None:
        self.bench, self.decoder, self.tokens = bench, decoder, tokens
        self.parts = (*decoder.layer(), decoder.head())
        self.calls: dict[tuple[Part, Chosen], Call] = {}

    def seconds(self, chosen: Mapping[Part, Chosen]) -> float:
        """Raises what Triton raises for tiles that do not fit."""
        for part in self.parts:
            if (part, chosen[part]) not in self.calls:  # made, and loaded, outside of the recording
                call = self.calls[part, chosen[part]] = Call(part, self.tokens, chosen[part])
                call(self.bench.inputs(part, self.tokens))
        return self.bench.graph_seconds(self._launches(chosen))

    def _launches(self, chosen: Mapping[Part, Chosen]) -> Iterator[Callable[[], None]]:
        *layer, head = self.parts
        for part in (*layer * self.decoder.layers, head):
            yield partial(self.calls[part, chosen[part]], self.bench.inputs(part, self.tokens))
            if part.name == "qkv":
                yield pause

    def refine(
        self, pool: ProcessPoolExecutor, found: Sequence[Found], deadline: float
    ) -> tuple[dict[Part, Chosen], float, float]:
        """The best sizes for the stack, what it takes with the best for each product by itself, and with these."""
        tried = {part: self._tried(part, found) for part in self.parts}
        wait([pool.submit(compile_all, part, self.tokens, one) for part in self.parts for one in tried[part]])
        best = {part: tried[part][0] for part in self.parts}
        first = least = self.seconds(best)
        for part in (*self.parts, *self.parts):
            for chosen in tried[part]:
                if chosen == best[part] or time.monotonic() > deadline:
                    continue
                try:
                    seconds = self.seconds({**best, part: chosen})
                except triton.runtime.errors.OutOfResources:
                    continue
                if seconds < least:
                    best, least = {**best, part: chosen}, seconds
        return best, first, least

    def _tried(self, part: Part, found: Sequence[Found]) -> list[Chosen]:
        """The fastest by themselves, first of all the very fastest; some with weights fetched ahead; the known."""
        fastest = [one.chosen for one in sorted(found, key=_time) if one.part == part][:_KEPT]
        ahead: list[Chosen] = [replace(one, lines=lines) for one in fastest[:3] for lines in (0, 16)]
        for one in fastest[:4]:
            if isinstance(one, MatvecTiles):
                waves = part.columns // (one.block_n * 2 * CORES)  # that follow the first
                ahead += [replace(one, ahead=later) for later in (1, 2, 4, 8) if later < waves]
        return list(dict.fromkeys([*fastest, *ahead, best_known(part, self.tokens)]))

    def row(self, pool: ProcessPoolExecutor, found: Sequence[Found], deadline: float) -> dict[str, Any]:
        best, first, least = self.refine(pool, found, deadline)
        moved = sum(part.bytes for part in (*self.decoder.layer() * self.decoder.layers, self.decoder.head()))
        return {
            "decoder": self.decoder.name,
            "tokens": self.tokens,
            "microseconds_by_itself": round(first * 1e6, 1),
            "microseconds": round(least * 1e6, 1),
            "fraction": round(moved / least / self.bench.copy, 4),
            "pauses": round(PAUSE * 1e-3 * self.decoder.layers, 1),
            "best": [{"part": part.name, **_sizes(part, self.tokens, chosen)} for part, chosen in best.items()],
        }


@triton.jit
def _pause(nanoseconds: tl.constexpr):
    gdc_launch_dependents()
    gdc_wait()
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass


def pause() -> None:
    """Attention over a short context: as long, on as many multiprocessors, and with no weights to read."""
    _pause[(CORES,)](PAUSE, num_warps=4, launch_pdl=True)


def print_table(found: Sequence[Found]) -> None:
    print(f"{'tokens':>6} {'decoder':8}{'part':8} {'µs':>8} {'GB/s':>6} {'of copy':>8}  tiles")
    for one in best_of(found):
        row = one.row()
        print(
            f"{one.tokens:6} {one.decoder:8}{one.part.name:8} {one.microseconds:8.1f} {row['gb_per_second']:6}"
            f" {one.fraction:8.1%}  {one.chosen}"
        )


def _share_of(deadline: float, part: float) -> float:
    """When `part` of the time until the deadline is over."""
    now = time.monotonic()
    return now + part * max(0.0, deadline - now)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tune_linear.json"))
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no more is tried")
    parser.add_argument("--tokens", default="1,32,8,64", help="of a step, separated by commas; 64 follows 32")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - 10.0  # for the stacks, and to write
    found: list[Found] = []
    stacks: list[dict[str, Any]] = []
    workers = max(1, (os.cpu_count() or 1) - 2)
    # Forked workers would share the device's context, which does not outlive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        bench = Bench()
        print(f"copy: {bench.copy / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
        steps = [int(tokens) for tokens in options.tokens.split(",")]
        for place, tokens in enumerate(steps):
            # Of the time that is left, more than the last ones get: those begin from the measurements of the first.
            until = _share_of(deadline, min(1.0, 1.6 / (len(steps) - place)))
            earlier = [one for one in found if one.tokens == 32 and tokens == 64]
            mine = tune(bench, pool, tokens, earlier, _share_of(until, 0.65))
            found += mine
            for index, decoder in enumerate(DECODERS):
                stop = _share_of(until, 1 / (len(DECODERS) - index))
                stacks.append(Stack(bench, decoder, tokens).row(pool, mine, stop))
                print(stacks[-1], flush=True)
        pool.shutdown(cancel_futures=True)
    print_table(found)
    document = {
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "copy_gb_per_second": round(bench.copy / 1e9),
        "stacks": stacks,
        "best": [one.row() for one in best_of(found)],
        "all": [one.row() for one in found],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
