"""The output of a lowering: launches of Triton kernels on tensors, before their compilation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from ingot.backends.triton.launches import Buffer, Expr
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import Choice, Problem, Source, choice_key
from ingot.ir.types import DTYPE_NAMES, TensorType

T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """A tensor that kernels read or write: the call's input with index `input`, or the buffer named `buffer`.

    Kernels take the address of its first element, and its strides as compile-time constants.
    """

    type: TensorType
    input: int | None = None
    buffer: str | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride of each axis in elements, as a number.

        In a row-major tensor, only the first size may be the name of a dim, because no stride depends on it.
        """
        if self.type.strides is not None:
            return self.type.strides
        strides, step = [], 1
        for size in reversed(self.type.shape):
            strides.append(step)
            step *= size if isinstance(size, int) else 1
        return tuple(reversed(strides))


# An argument of a launch: a tensor, several under one name, an integer, or None.
Argument = Value | tuple[Value, ...] | Expr | None


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of the `triton.jit` function `kernel`, before compilation.

    `arguments` are the run-time arguments by parameter name: Values, tuples of Values, Exprs (i32 integers) and None.
    `constants` are the `tl.constexpr` ones. `stages` is Triton's `num_stages`. `registers` limits the registers per
    thread; None means no limit. With `dependent`, the launch may begin before the previous one has ended. Then each
    program of the kernel begins with `gdc_launch_dependents()`, and on every path calls `gdc_wait()` before it reads or
    writes memory that another kernel writes. It may load weights before.
    """

    kernel: Any
    grid: tuple[Expr, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    dependent: bool = False

    @property
    def values(self) -> list[Value]:
        """Return the tensors among the launch's arguments."""
        given = (one if isinstance(one, tuple) else (one,) for one in self.arguments.values())
        return [value for several in given for value in several if isinstance(value, Value)]

    @property
    def options(self) -> dict[str, Any]:
        """Return the compiler options of the launch by Triton's names, such as `num_warps` and `maxnreg`."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "launch_pdl": self.dependent,
        }


@dataclass
class Schedule:
    """The kernel launches that compute a call or a region (fused calls), in order, and the buffers that they need.

    The first fields describe the target, by which lowerings choose kernels and tile sizes. `sm` is the compute
    capability (90 for Hopper), `cores` the number of multiprocessors, `bucket` the range of step sizes. A step has at
    most `sequences` sequences (None: as many as tokens). `dependent` says that the target supports programmatic
    dependent launch. `given` holds tile sizes, such as those of a tuning log, that replace the lowerings' own; its keys
    are kernel and sizes of a call (`choice_key`). `choices` records the tile sizes in use.
    """

    sm: int
    cores: int
    bucket: BucketClass
    sequences: int | None = None
    dependent: bool = False
    given: Mapping[str, Choice] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    launches: list[KernelLaunch] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)

    @property
    def most_sequences(self) -> int:
        """Return the most sequences that a step can have in the bucket class (range of step sizes)."""
        return self.bucket.tokens[1] if self.sequences is None else self.sequences

    def choose(
        self,
        kernel: str,
        problem: Problem,
        kind: type[T],
        known: Callable[[], tuple[T, Source]],
        microseconds: float | None = None,
    ) -> T:
        """Choose the tile sizes of `kernel`, record them in `choices`, and return them as a dataclass `kind`.

        `problem` holds the sizes and dtypes of the call. If `given` has tile sizes for it, choose these; otherwise
        `known` returns them, with their source ("table" or "heuristic"). `microseconds` is the measured time of a call
        with the tile sizes of `known`, or None.
        """
        choice = self.given.get(choice_key(kernel, problem))
        if choice is None:
            tiles, source = known()
            fields = asdict(tiles)  # type: ignore[call-overload]  # a dataclass
            choice = Choice(
                kernel=kernel, problem=dict(problem), tiles=fields, source=source, microseconds=microseconds
            )
        else:
            tiles = kind(**choice.tiles)
        self.choices.append(choice)
        return tiles

    def output(self, value_type: TensorType) -> Value:
        """Add a row-major buffer for a result of type `value_type` to the schedule, and return it."""
        return self._buffer("output", value_type.dtype, value_type.shape)

    def scratch(self, dtype: torch.dtype, shape: Sequence[Expr]) -> Value:
        """Add a scratch buffer, which each call allocates, and return it. Its contents are undefined, even NaN."""
        return self._buffer("scratch", dtype, shape)

    def counter(self, shape: Sequence[Expr]) -> Value:
        """Add a permanent buffer of i32 zeros, and return it. Each call must leave it zero. `shape` names no dims."""
        return self._buffer("counter", torch.int32, shape)

    def _buffer(self, kind: str, dtype: torch.dtype, shape: Sequence[Expr]) -> Value:
        name = f"{kind}{sum(buffer.kind == kind for buffer in self.buffers.values())}"
        self.buffers[name] = Buffer(dtype=DTYPE_NAMES[dtype], shape=tuple(shape), kind=kind)
        sizes = tuple(size if isinstance(size, int | str) else 0 for size in shape)
        return Value(TensorType(dtype, sizes), buffer=name)

    def launch(
        self,
        kernel: Any,
        grid: Sequence[Expr],
        arguments: Mapping[str, Argument],
        constants: Mapping[str, Any],
        *,
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
        dependent: bool = False,
    ) -> None:
        """Append a launch of the `triton.jit` function `kernel`. The arguments are the fields of KernelLaunch."""
        self.launches.append(
            KernelLaunch(kernel, tuple(grid), dict(arguments), dict(constants), warps, stages, registers, dependent)
        )
