"""What a lowering writes: launches of Triton kernels over values and buffers, before anything is compiled."""

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
    """A tensor that kernels read or write: an input of the call by its place, or a buffer by its name.

    The address is that of its first element; where its elements lie, `type.strides` says, and kernels get that as
    compile-time constants.
    """

    type: TensorType
    input: int | None = None
    buffer: str | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, by axis. A symbol stands in front at most, or the axes behind it have none."""
        if self.type.strides is not None:
            return self.type.strides
        strides, step = [], 1
        for size in reversed(self.type.shape):
            strides.append(step)
            step *= size if isinstance(size, int) else 1
        return tuple(reversed(strides))


# What a kernel is launched with: a tensor, several under one name, an integer, or nothing.
Argument = Value | tuple[Value, ...] | Expr | None


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of the `triton.jit` function `kernel`.

    `arguments` are Values, tuples of Values, Exprs (i32 integers, sizes among them) and None, by the names of the
    kernel's parameters without `tl.constexpr`; `constants` are the others. A thread has `registers` at most, None for
    as many as the compiler likes. Where `dependent`, each program of the kernel begins with `gdc_launch_dependents()`
    and calls `gdc_wait()`, on every path, before it touches anything that a kernel writes; weights it may load before.
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
        """The tensors among the arguments."""
        given = (one if isinstance(one, tuple) else (one,) for one in self.arguments.values())
        return [value for several in given for value in several if isinstance(value, Value)]

    @property
    def options(self) -> dict[str, Any]:
        """What Triton's compiler is told, by its names."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "launch_pdl": self.dependent,
        }


@dataclass
class Schedule:
    """The launches that compute a call or a region, in order, and the buffers that they need.

    `sm` is the compute capability that is compiled for (90 for Hopper), `cores` its multiprocessors, `bucket` the steps
    that the call serves, of `sequences` sequences at most (None: of as many as tokens): lowerings choose kernels and
    tile sizes by them. `dependent`: the target knows programmatic
    dependent launch. `given` are choices of tile sizes by their keys, ahead of those that lowerings know, and `choices`
    what was chosen.
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
        return self.bucket.tokens[1] if self.sequences is None else self.sequences

    def choose(
        self,
        kernel: str,
        problem: Problem,
        kind: type[T],
        known: Callable[[], tuple[T, Source]],
        microseconds: float | None = None,
    ) -> T:
        """The tile sizes of `kernel` for a problem, fields of a dataclass `kind`: the given ones, else the `known`,
        with which a call takes `microseconds` where that was measured."""
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
        """A new result, row-major."""
        return self._buffer("output", value_type.dtype, value_type.shape)

    def scratch(self, dtype: torch.dtype, shape: Sequence[Expr]) -> Value:
        """Memory for this call alone; what it holds at first is anything, NaN among it."""
        return self._buffer("scratch", dtype, shape)

    def counter(self, shape: Sequence[Expr]) -> Value:
        """Integers that are zero when a call begins, and that the call must leave zero. No dims in the shape."""
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
        self.launches.append(
            KernelLaunch(kernel, tuple(grid), dict(arguments), dict(constants), warps, stages, registers, dependent)
        )
