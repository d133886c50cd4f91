"""Types of the values in a program: tensors with symbolic sizes, states, tuples.

A size is an int or a dim's name from the closed table `DIM_MEANINGS`. A data-dependent size is never a symbol.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ingot.ir.errors import VerifyError

Size = int | str

DIM_MEANINGS: Mapping[str, str] = {
    "T": "tokens in a step, over all sequences",
    "T_tp": "rows of a step on one rank, if the ranks of the mesh axis tp split its tokens: T / tp, rounded up",
    "B": "sequences in a step",
    "L": "rows of logits computed in a step",
    "P": "page-table entries per sequence in a step",
    "G": "rows of the table of shared prefixes in a step: 1 if nothing is shared, else one for each sequence",
    "R": "device rows, one for each sequence that runs (fixed when an artifact is loaded)",
    "S": "slots of per-sequence states (fixed when an artifact is loaded)",
    "E": "injected embedding rows in a step",
    "pages": "pages in the KV pool (fixed when an artifact is loaded)",
}

# Sizes that the loader derives from free memory, with their maximum: indices are int32.
LOADED_DIMS: Mapping[str, int] = {"pages": 2**31 - 1, "S": 2**31 - 1}

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e8m0": torch.float8_e8m0fnu,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Dim:
    """The bounds of a symbol in shapes, such as "T" for the tokens of a step: `lo <= size <= hi`."""

    name: str
    lo: int
    hi: int

    def __post_init__(self) -> None:
        if self.name not in DIM_MEANINGS:
            raise VerifyError(f"unknown dim '{self.name}'", expected="one of " + ", ".join(DIM_MEANINGS))
        if not 1 <= self.lo <= self.hi:
            raise VerifyError(f"dim {self.name} in [{self.lo}, {self.hi}] is empty", expected="1 <= lo <= hi")

    def __str__(self) -> str:
        return f"{self.name} in [{self.lo}, {self.hi}]"


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[int, ...] | None:
    """Return the row-major strides of `shape` in elements; None if any axis but the first is a symbol."""
    strides: list[int] = []
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        strides.append(step)
        size = shape[axis]
        if isinstance(size, str):
            if axis != 0:
                return None
        else:
            step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor. A size in `shape` is a number or a symbol such as "T".

    `strides` are in elements. None means row-major. No stride depends on a symbol.
    """

    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise VerifyError(f"dtype {self.dtype} is not supported by the IR", expected=", ".join(DTYPES))
        if self.strides is not None and self.strides == contiguous_strides(self.shape):
            object.__setattr__(self, "strides", None)

    def __str__(self) -> str:
        body = ", ".join(str(size) for size in self.shape)
        if self.strides is not None:
            body += "; " + ", ".join(str(stride) for stride in self.strides)
        return f"{DTYPE_NAMES[self.dtype]}[{body}]"

    def bind(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with each symbol, such as "T", replaced by its size in `sizes`."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def holds(self, other: "TensorType") -> bool:
        """Return whether this type can hold every tensor of the type `other` without loss.

        Shape and strides must be equal. The dtypes must be equal or both floating-point. This dtype must represent all
        values of the other dtype exactly.
        """
        if (self.shape, self.strides) != (other.shape, other.strides):
            return False
        both_float = self.dtype.is_floating_point and other.dtype.is_floating_point
        return self.dtype == other.dtype or (both_float and torch.promote_types(self.dtype, other.dtype) == self.dtype)

    def mismatch(self, tensor: torch.Tensor, sizes: Mapping[str, int] | None = None) -> str | None:
        """Return as text how `tensor` differs from this type; None if it fits.

        `sizes` maps symbols such as "T" to sizes. A symbol that is not in it fits any size. Strides of axes of size 0
        or 1 are ignored.
        """
        if tensor.dtype != self.dtype:
            return f"dtype {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, expected {DTYPE_NAMES[self.dtype]}"
        if tensor.dim() != len(self.shape):
            return f"shape {list(tensor.shape)}, expected {self}"
        for found, size in zip(tensor.shape, self.shape, strict=True):
            wanted = (sizes or {}).get(size) if isinstance(size, str) else size
            if wanted is not None and found != wanted:
                return f"shape {list(tensor.shape)}, expected {self}"
        if self.strides is None:
            return None if tensor.is_contiguous() else f"strides {list(tensor.stride())}, expected row-major {self}"
        for found, wanted_stride, size in zip(tensor.stride(), self.strides, tensor.shape, strict=True):
            if size > 1 and found != wanted_stride:
                return f"strides {list(tensor.stride())}, expected {self}"
        return None


@dataclass(frozen=True)
class StateType:
    """The type of a state: a tensor, such as a KV cache, that stays on the device between steps.

    `name` is the state's name. An op that writes the state returns a new version of it, of equal type.
    """

    name: str

    def __str__(self) -> str:
        return f"state<{self.name}>"


@dataclass(frozen=True)
class TupleType:
    """The type of a call that returns several results: one type for each."""

    items: tuple["ValueType", ...]

    def __str__(self) -> str:
        return "(" + ", ".join(str(item) for item in self.items) + ")"


ValueType = TensorType | StateType | TupleType


@dataclass(frozen=True)
class Placement:
    """How a value is distributed over the ranks of one mesh axis.

    `kind` is "replicated", "shard" (split along `dim`) or "partial" (the sum over the ranks is the value). `segments`
    are the sizes of the parts of a merged tensor, such as q, k and v, before the split. Each of these parts is split by
    itself. Only programs on a mesh have placements. Before that, a param has a `Split`.
    """

    axis: str
    kind: str
    dim: int = 0
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("replicated", "shard", "partial"):
            raise VerifyError(f"unknown placement '{self.kind}'", expected="replicated, shard or partial")

    def __str__(self) -> str:
        if self.kind != "shard":
            return f"{self.axis}={self.kind}"
        segments = f", segments=[{', '.join(map(str, self.segments))}]" if self.segments else ""
        return f"{self.axis}=shard({self.dim}{segments})"


@dataclass(frozen=True)
class Split:
    """How a mesh may split a param along `dim`, over the ranks of the mesh axis `axis`.

    A unit is a run of `unit` elements that stays on one rank, such as a head. `segments` are the sizes of the parts of
    a merged tensor, such as q, k and v. Each of these parts is split by itself.

    Two flags matter if the number of units is not a multiple of the number of ranks. Without `needed`, every rank holds
    the whole param. With `needed` and `repeat`, several ranks hold a copy of one unit. With `needed` alone, the shard
    pass refuses the mesh.
    """

    axis: str
    dim: int
    segments: tuple[int, ...] = ()
    unit: int = 1
    repeat: bool = False
    needed: bool = True

    def __post_init__(self) -> None:
        if self.dim < 0 or self.unit < 1:
            raise VerifyError(
                f"a split in units of {self.unit} of dim {self.dim}", expected="dim 0 or more, unit 1 or more"
            )

    def __str__(self) -> str:
        options = [f"segments=[{', '.join(map(str, self.segments))}]"] if self.segments else []
        options += [f"unit={self.unit}"] if self.unit > 1 else []
        options += [word for word, said in (("repeat", self.repeat), ("optional", not self.needed)) if said]
        return f"{self.axis}=split({', '.join([str(self.dim), *options])})"

    @property
    def turned(self) -> "Split":
        """Return the split of the transposed matrix: along the other axis."""
        return replace(self, dim=1 - self.dim)


def concatenated(splits: Sequence[Split | None], sizes: Sequence[int]) -> Split | None:
    """Return how a mesh splits several tensors after they are concatenated along axis 0; None if all stay whole.

    `splits[i]` says how tensor i is split; None: it stays whole. `sizes[i]` is its size along axis 0. The result's unit
    is the least common multiple of all units. Its units may be repeated only if all tensors allow it and have equal
    units. Raises VerifyError if only some tensors are split, or if they are not all split along axis 0 of one mesh
    axis.
    """
    if not any(splits):
        return None
    found = [split for split in splits if split is not None]
    if len(found) < len(splits) or any((split.axis, split.dim) != (found[0].axis, 0) for split in found):
        raise VerifyError("no common split along axis 0", expected="all parts whole, or all split along axis 0")
    segments = [size for split, whole in zip(found, sizes, strict=True) for size in split.segments or (whole,)]
    return Split(
        found[0].axis,
        0,
        tuple(segments),
        math.lcm(*(split.unit for split in found)),
        repeat=all(split.repeat and split.unit == found[0].unit for split in found),
        needed=any(split.needed for split in found),
    )
