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
    """A tensor that kernels read or write. It is the call's input with index `input`, or the buffer named `buffer`.

    Kernels take the address of its first element as an argument, and its strides as compile-time constants.
    """

    type: TensorType
    input: int | None = None
    buffer: str | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride of each axis in elements.

        Strides are numbers. In a row-major tensor, only the first size may therefore be a symbolic dim, such as "T".
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
    `constants` are the `tl.constexpr` arguments. `stages` is Triton's `num_stages`. `registers` limits the registers
    per thread; None means no limit.

    With `dependent`, the launch may begin before the previous one has ended. Each program of the kernel must then begin
    with `gdc_launch_dependents()`. On every path, it must call `gdc_wait()` before it reads or writes memory that
    another kernel writes. It may load weights before that call.
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
        """Return the compiler options of the launch by their names in Triton, such as `num_warps` and `maxnreg`."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "launch_pdl": self.dependent,
        }


@dataclass
class Schedule:
    """The kernel launches that compute a call or a region (fused calls), in order, and the buffers that they need.

    The first fields describe the target. `sm` is the compute capability (90 for Hopper), `cores` the number of
    multiprocessors, and `bucket` the range of step sizes. A step has at most `sequences` sequences; None means as many
    as tokens. `dependent` says whether the target supports programmatic dependent launch.

    `given` holds tile sizes, for example from a tuning log. They replace the tile sizes that a lowering would choose. A
    key is the kernel with the sizes of the call (`choice_key`). `choices` records the tile sizes in use.
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
        """Return the most sequences that a step of the bucket class (range of step sizes) can have."""
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

        `problem` holds the sizes and dtypes of the call. Tile sizes for it in `given` win. Otherwise `known` returns
        the tile sizes and their source ("table" or "heuristic"). `microseconds` is the measured time of a call with the
        tile sizes of `known`, or None.
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
        """Add a row-major buffer for a result of type `value_type`, and return it."""
        return self._buffer("output", value_type.dtype, value_type.shape)

    def scratch(self, dtype: torch.dtype, shape: Sequence[Expr]) -> Value:
        """Add a scratch buffer, and return it. Each call allocates it anew, with undefined contents that may be NaN."""
        return self._buffer("scratch", dtype, shape)

    def counter(self, shape: Sequence[Expr]) -> Value:
        """Add a permanent buffer of i32 zeros, and return it. `shape` must be numbers, not symbolic dims such as "T".

        Each call must leave the buffer zeroed.
        """
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
        """Append a launch of the `triton.jit` function `kernel`. KernelLaunch describes the other arguments."""
        self.launches.append(
            KernelLaunch(kernel, tuple(grid), dict(arguments), dict(constants), warps, stages, registers, dependent)
        )
