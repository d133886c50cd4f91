"""A product as launches in a CUDA graph: compiled ahead, on weights that no cache holds, and timed."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from linear_products import CORES, DTYPE, SM, Chosen, Part
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.linear import Gate, Linear, Norm, schedule_linear
from ingot.backends.triton.schedule import KernelLaunch, Schedule, Value
from ingot.ir.plan import BucketClass
from ingot.ir.types import DTYPE_NAMES, DTYPES, TensorType

DEVICE = "cuda"
EPS = 1e-5
POOL = 3 << 30  # bytes of weights that the launches go over: fifty times the last-level cache of an H200
TRAFFIC = 1 << 31  # bytes that a graph reads at least: half a millisecond, against some microseconds of its launch
MOST_LAUNCHES = 128  # in a graph: to record one takes longer than to run it
PAUSE = 4000  # nanoseconds
BUCKETS = {1: (1, 1), 8: (2, 16), 32: (17, 32), 64: (33, 64)}


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

    def measure(self, part: Part, tokens: int, chosen: Chosen) -> float:
        """Seconds of a launch. Raises RuntimeError for wrong results, and what Triton raises for tiles that do not
        fit."""
        call = Call(part, tokens, chosen)
        inputs = self.inputs(part, tokens)
        call(inputs)
        _check(call, inputs)
        count = min(MOST_LAUNCHES, max(4, TRAFFIC // part.bytes))
        return self.graph_seconds(partial(call, self.inputs(part, tokens)) for _ in range(count)) / count


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
