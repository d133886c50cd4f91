"""Time matmul kernels with different tile sizes. The weights in a measurement exceed the L2 cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ingot.backends.triton.lower.linear.call import Gate, Linear, Norm
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear.weight import plain_weight
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, compile_launches
from ingot.backends.triton.tune.linear_candidates import AnyTiles
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES, TensorType

EPS = 1e-5
TRAFFIC = 1 << 31  # least bytes that a graph reads: half a millisecond, against some microseconds for its launch
MOST_LAUNCHES = 128  # most launches of a graph: recording a launch takes longer than running it
_CHECKED = 256  # columns of a result that are compared with the reference
# For each number of rows of a kernel: the tokens of the timed step, and the range of tokens of its bucket class.
STEPS = {1: 1, 16: 8, 32: 32, 64: 64}
_BUCKETS = {1: (1, 1), 16: (2, 16), 32: (17, 32), 64: (33, 64)}


@dataclass(frozen=True)
class TimedLinear:
    """The measurement of a matmul with certain tile sizes. `microseconds` is the time of one call.

    `fraction` is the bandwidth at which the matmul reads its weight, divided by the bandwidth of a copy on this GPU.
    """

    problem: LinearProblem
    tiles: AnyTiles
    microseconds: float
    fraction: float


def make_schedule(machine: Machine, problem: LinearProblem, tiles: AnyTiles | None) -> tuple[Schedule, Value]:
    """Return the schedule (the kernel launches) of a matmul with these tile sizes, and the matmul's result.

    If `tiles` is None, the best known tile sizes are used. The inputs are x, weight, the norm's weight and residual.
    """
    dtype = DTYPES[problem.dtype]
    bucket = BucketClass(name="tuning", tokens=_BUCKETS[problem.tokens])
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    if tiles is not None:
        choice = Choice(kernel=LINEAR, problem=problem.fields(), tiles=asdict(tiles), source="measured")
        schedule.given = {choice.key: choice}
    linear = Linear(
        Value(TensorType(dtype, ("T", problem.depth)), input=0),
        plain_weight(Value(TensorType(dtype, (problem.rows, problem.depth)), input=1)),
        None,
        TensorType(DTYPES[problem.result], ("T", problem.columns)),
        norm=Norm(Value(TensorType(dtype, (problem.depth,)), input=2), EPS) if problem.norm else None,
        gate=Gate("silu", 0, problem.columns) if problem.gated else None,
        residual=Value(TensorType(dtype, ("T", problem.columns)), input=3) if problem.residual else None,
    )
    return schedule, schedule_linear(linear, schedule)


def compile_all(machine: Machine, problem: LinearProblem, tiles: AnyTiles | None) -> None:
    """Compile the matmul kernels with these tile sizes into Triton's cache on disk, without using the GPU.

    If `tiles` is None, the best known tile sizes are used.
    """
    compile_launches(make_schedule(machine, problem, tiles)[0], {"T": STEPS[problem.tokens]})


def launcher(machine: Machine, problem: LinearProblem, tiles: AnyTiles | None) -> Launcher:
    """Return a function that launches a matmul with these tile sizes on given inputs.

    If `tiles` is None, the best known tile sizes are used.
    """
    return Launcher(*make_schedule(machine, problem, tiles), {"T": STEPS[problem.tokens]})


class LinearBench:
    """A benchmark of matmuls. Each call takes its weight from another part of a memory pool.

    The weights of a measurement are therefore not in a cache.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._vectors = torch.randn(64, 1 << 18, generator=pool.generator, device=device.DEVICE)
        self._place = 0

    def weight(self, problem: LinearProblem) -> torch.Tensor:
        """Return the next part of the memory pool as a weight [rows, depth] for the matmul `problem`."""
        count = problem.rows * problem.depth
        memory = self.pool.of(DTYPES[problem.dtype], 2 * problem.bytes)
        if self._place + count > memory.numel():
            self._place = 0
        weight = memory[self._place : self._place + count].view(problem.rows, problem.depth)
        self._place += count
        return weight

    def inputs(self, problem: LinearProblem) -> list[torch.Tensor]:
        """Return inputs for one call of a matmul: x, the next weight of the pool, the norm's weight, the residual."""
        dtype, tokens = DTYPES[problem.dtype], STEPS[problem.tokens]
        vectors = self._vectors_of(dtype)

        def matrix(size: int) -> torch.Tensor:
            return vectors.flatten()[: tokens * size].view(tokens, size)

        return [matrix(problem.depth), self.weight(problem), vectors[1, : problem.depth], matrix(problem.columns)]

    def _vectors_of(self, dtype: torch.dtype) -> torch.Tensor:
        if self._vectors.dtype is not dtype:
            self._vectors = self._vectors.to(dtype)
        return self._vectors

    def measure(self, machine: Machine, problem: LinearProblem, tiles: AnyTiles) -> TimedLinear:
        """Check and time a matmul with these tile sizes, and return the measurement.

        Raises RuntimeError for wrong results, and Triton's errors for tiles that do not fit.
        """
        call = launcher(machine, problem, tiles)
        inputs = self.inputs(problem)
        call(inputs)
        device.require_close(call.output[:, :_CHECKED], expected(problem, inputs, _CHECKED))
        count = min(MOST_LAUNCHES, max(4, TRAFFIC // problem.bytes))
        seconds = device.graph_seconds(partial(call, self.inputs(problem)) for _ in range(count)) / count
        return TimedLinear(problem, tiles, seconds * 1e6, problem.bytes / seconds / self.pool.copy)


def expected(problem: LinearProblem, inputs: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Return the first `columns` columns of a matmul's expected result, computed in float32.

    `inputs` are x, weight, the norm's weight and residual.
    """
    dtype, columns = DTYPES[problem.dtype], min(columns, problem.columns)
    x, weight, gain, residual = (value.float() for value in (inputs[0], inputs[1][:columns], inputs[2], inputs[3]))
    if problem.norm:
        x = ((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype).float() * gain).to(dtype).float()
    result = x @ weight.T
    if problem.gated:
        up = inputs[1][problem.columns : problem.columns + columns].float()
        result = torch.nn.functional.silu(result) * (x @ up.T)
    return result + residual[:, :columns] if problem.residual else result
