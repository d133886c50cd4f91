"""A product as launches in a CUDA graph: compiled ahead, on weights that no cache holds, and timed.

A graph holds a row of launches, each of which may begin before the one in front has ended. Kernels are run by Triton's
own launcher.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.linear import Gate, Linear, Norm, schedule_linear
from ingot.backends.triton.lower.linear_problem import LINEAR, LinearProblem
from ingot.backends.triton.schedule import KernelLaunch, Schedule, Value
from ingot.backends.triton.tune.candidates import AnyTiles, Machine
from ingot.ir.plan import BucketClass
from ingot.ir.tuning import Choice
from ingot.ir.types import DTYPE_NAMES, DTYPES, TensorType

DEVICE = "cuda"
EPS = 1e-5
POOL = 3 << 30  # bytes of weights that the launches go over: sixty times the last-level cache of an H200
TRAFFIC = 1 << 31  # bytes that a graph reads at least: half a millisecond, against some microseconds of its launch
MOST_LAUNCHES = 128  # in a graph: to record one takes longer than to run it
# Steps that are timed, by the rows that a kernel works on, and the bucket classes that have them.
STEPS = {1: 1, 16: 8, 32: 32, 64: 64}
_BUCKETS = {1: (1, 1), 16: (2, 16), 32: (17, 32), 64: (33, 64)}


@dataclass(frozen=True)
class Timed:
    """A measurement: microseconds of one call, and the share of a copy's bandwidth at which it read its weights."""

    problem: LinearProblem
    tiles: AnyTiles
    microseconds: float
    fraction: float


def make_schedule(machine: Machine, problem: LinearProblem, tiles: AnyTiles | None) -> tuple[Schedule, Value]:
    """The launches with these tiles, else with the best known. Inputs in order: x, weight, gain, residual."""
    dtype = DTYPES[problem.dtype]
    bucket = BucketClass(name="tuning", tokens=_BUCKETS[problem.tokens])
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    if tiles is not None:
        choice = Choice(kernel=LINEAR, problem=problem.fields(), tiles=asdict(tiles), source="measured")
        schedule.given = {choice.key: choice}
    linear = Linear(
        Value(TensorType(dtype, ("T", problem.depth)), input=0),
        Value(TensorType(dtype, (problem.rows, problem.depth)), input=1),
        None,
        TensorType(DTYPES[problem.result], ("T", problem.columns)),
        norm=Norm(Value(TensorType(dtype, (problem.depth,)), input=2), EPS) if problem.norm else None,
        gate=Gate("silu", 0, problem.columns) if problem.gated else None,
        residual=Value(TensorType(dtype, ("T", problem.columns)), input=3) if problem.residual else None,
    )
    return schedule, schedule_linear(linear, schedule)


def compile_all(machine: Machine, problem: LinearProblem, tiles: AnyTiles) -> None:
    """Fill Triton's cache on disk with the kernels of a measurement, without touching the GPU."""
    for launch in make_schedule(machine, problem, tiles)[0].launches:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}  # an entry for each parameter: so the cache has them
        for place, name in enumerate(launch.kernel.arg_names):
            value = launch.arguments.get(name)
            aligned = isinstance(value, Value) or (value is not None and STEPS[problem.tokens] % 16 == 0)
            attributes[(place,)] = [["tt.divisibility", 16]] if aligned else []
            if isinstance(value, Value):
                names = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "i32": "i32"}
                signature[name] = "*" + names[DTYPE_NAMES[value.type.dtype]]
            elif value is None:
                signature[name] = "constexpr"
                constants[name] = launch.constants.get(name)
            else:
                signature[name] = "i32"
        source = ASTSource(launch.kernel, signature, constants, attributes)
        triton.compile(source, target=GPUTarget("cuda", machine.sm, 32), options=options_of(launch))


def options_of(launch: KernelLaunch) -> dict[str, Any]:
    return {"num_warps": launch.warps, "num_stages": launch.stages, "launch_pdl": launch.dependent}


@dataclass
class Call:
    """A product with its buffers, to be launched on weights anywhere in the pool."""

    machine: Machine
    problem: LinearProblem
    tiles: AnyTiles | None
    schedule: Schedule = field(init=False)
    result: Value = field(init=False)
    buffers: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = {"T": STEPS[self.problem.tokens]}
        self.schedule, self.result = make_schedule(self.machine, self.problem, self.tiles)
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
            launch.kernel[grid](**arguments, **launch.constants, **options_of(launch))

    def _argument(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, Value):
            return inputs[value.input] if value.input is not None else self.buffers[str(value.buffer)]
        return None if value is None else evaluate(value, self.sizes)


class Bench:
    """The pool of weights, and the times of graphs over it. `copy` is the bandwidth of a copy on this device: bytes a
    second, read and written together."""

    def __init__(self) -> None:
        self._generator = torch.Generator(DEVICE).manual_seed(1)
        self._vectors = torch.randn(64, 1 << 18, generator=self._generator, device=DEVICE)
        self._pool = torch.empty(POOL // 2, dtype=torch.bfloat16, device=DEVICE)
        self._filled = False
        self._place = 0
        half = self._pool.numel() // 2
        self.copy = POOL / self.seconds(lambda: self._pool[:half].copy_(self._pool[half:]))

    def weight(self, problem: LinearProblem) -> torch.Tensor:
        """The next stretch of the pool as a weight."""
        count = problem.rows * problem.depth
        self._fill(DTYPES[problem.dtype], max(POOL, 2 * problem.bytes))
        if self._place + count > self._pool.numel():
            self._place = 0
        weight = self._pool[self._place : self._place + count].view(problem.rows, problem.depth)
        self._place += count
        return weight

    def _fill(self, dtype: torch.dtype, size: int) -> None:
        """Have the pool hold at least `size` bytes of random numbers of a dtype."""
        count = size // dtype.itemsize
        if self._filled and self._pool.dtype is dtype and self._pool.numel() >= count:
            return
        self._pool = torch.empty(0, device=DEVICE)  # the old one first: two may be too much
        self._pool = torch.empty(count, dtype=dtype, device=DEVICE)
        for begin in range(0, count, 1 << 28):
            self._pool[begin : begin + (1 << 28)].normal_(generator=self._generator).mul_(0.02)
        self._filled, self._place = True, 0

    def inputs(self, problem: LinearProblem) -> list[torch.Tensor]:
        dtype, tokens = DTYPES[problem.dtype], STEPS[problem.tokens]
        vectors = self._vectors_of(dtype)

        def matrix(size: int) -> torch.Tensor:
            return vectors.flatten()[: tokens * size].view(tokens, size)

        return [matrix(problem.depth), self.weight(problem), vectors[1, : problem.depth], matrix(problem.columns)]

    def _vectors_of(self, dtype: torch.dtype) -> torch.Tensor:
        if self._vectors.dtype is not dtype:
            self._vectors = self._vectors.to(dtype)
        return self._vectors

    def seconds(self, work: Callable[[], object], rounds: int = 7) -> float:
        """The median time of `work`, by events of the device."""
        work()
        times: list[float] = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3)
        return statistics.median(times)

    def graph_seconds(self, launches: Iterable[Callable[[], None]]) -> float:
        """The time of a CUDA graph of the launches."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        return self.seconds(graph.replay)

    def measure(self, machine: Machine, problem: LinearProblem, tiles: AnyTiles) -> Timed:
        """Raises RuntimeError for wrong results, and what Triton raises for tiles that do not fit."""
        call = Call(machine, problem, tiles)
        inputs = self.inputs(problem)
        call(inputs)
        _check(call, inputs)
        count = min(MOST_LAUNCHES, max(4, TRAFFIC // problem.bytes))
        seconds = self.graph_seconds(partial(call, self.inputs(problem)) for _ in range(count)) / count
        return Timed(problem, tiles, seconds * 1e6, problem.bytes / seconds / self.copy)


def _check(call: Call, inputs: Sequence[torch.Tensor]) -> None:
    """The first columns against the same in float32."""
    problem, dtype = call.problem, DTYPES[call.problem.dtype]
    x, weight, gain, residual = (value.float() for value in (inputs[0], inputs[1][:256], inputs[2], inputs[3]))
    if problem.norm:
        x = ((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype).float() * gain).to(dtype).float()
    if problem.gated:
        columns = min(256, problem.columns)
        up = inputs[1][problem.columns : problem.columns + columns].float()
        expected = torch.nn.functional.silu(x @ weight[:columns].T) * (x @ up.T)
    else:
        expected = x @ weight.T
    if problem.residual:
        expected += residual[:, :256]
    found = call.output[:, :256].float()
    error = float((found - expected).norm() / expected.norm())
    if not error < 1e-2:  # bf16 rounds by 2e-3
        raise RuntimeError(f"the result is wrong by {error}")
