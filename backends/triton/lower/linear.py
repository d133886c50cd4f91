"""linear for few tokens, alone or with what stands in front of it and behind it, as launches."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ingot.backends.triton.kernels.linear_blocks import linear_blocks
from ingot.backends.triton.kernels.linear_matvec import linear_matvec
from ingot.backends.triton.kernels.linear_tile import linear_tile
from ingot.backends.triton.kernels.norm import norm as norm_kernel
from ingot.backends.triton.launches import Expr, cdiv, times
from ingot.backends.triton.lower.call import Call, Lowering, Refused
from ingot.backends.triton.lower.linear_choice import known_microseconds, known_tiles
from ingot.backends.triton.lower.linear_invariant import (
    BlockTiles,
    Sums,
    block_tiles,
    few_tiles,
    invariant_products,
    sums_of,
)
from ingot.backends.triton.lower.linear_problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Tiles
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.types import DTYPE_NAMES, TensorType

# Above this many tokens a product is bound by arithmetic, and the library's kernels are ahead.
MOST_TOKENS = 64
# One program norms a whole row in registers: 64 KB of float32, 128 bytes for each of 512 threads.
MOST_NORMED = 16384
# Programs on each multiprocessor that find room beside those of the kernels in front, whose end they wait for.
_EARLY = 2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Norm:
    """An rms_norm of x in front of the product."""

    weight: Value
    eps: float


@dataclass(frozen=True)
class Gate:
    """`activation(first) * second` behind the product, of two parts of its columns that begin at `gate` and `up`.

    `activation` is "silu", "gelu" or "gelu_tanh".
    """

    activation: str
    gate: int
    up: int


@dataclass(frozen=True)
class Linear:
    """`linear(norm(x), weight, bias)`, gated, plus `residual`, as `result`; what is None is left out.

    Only `result` is rounded, and the norm: what lies between stays in float32.
    """

    x: Value
    weight: Value
    bias: Value | None
    result: TensorType
    norm: Norm | None = None
    gate: Gate | None = None
    residual: Value | None = None

    @property
    def rows(self) -> Expr:
        return self.x.type.shape[0]

    @property
    def columns(self) -> int:
        """Of the result."""
        return _size(self.result.shape[1])

    @property
    def depth(self) -> int:
        """How many products a result sums up."""
        return _size(self.x.type.shape[1])

    def problem(self, tokens: int) -> LinearProblem:
        """For so many rows of x, padded."""
        return LinearProblem(
            columns=self.columns,
            depth=self.depth,
            tokens=tokens,
            dtype=DTYPE_NAMES[self.weight.type.dtype],
            result=DTYPE_NAMES[self.result.dtype],
            gated=self.gate is not None,
            norm=self.norm is not None,
            residual=self.residual is not None,
        )


def lower_linear(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """A call of linear by itself."""
    (result,) = call.results
    return (schedule_linear(Linear(call.value("x"), call.value("weight"), call.optional("bias"), result), schedule),)


def schedule_linear(linear: Linear, schedule: Schedule) -> Value:
    """Add the launches that compute `linear`. Raises Refused."""
    _check(linear)
    most = _most_rows(linear, schedule)
    if schedule.bucket.batch_invariant:
        return _invariant(linear, schedule, most)
    if most > MOST_TOKENS:
        raise Refused("the library's product is faster for many tokens")
    tokens = padded_tokens(most)
    problem = linear.problem(tokens)
    chosen = schedule.choose(
        LINEAR,
        problem.fields(),
        problem.tiles_kind,
        lambda: known_tiles(problem.product(), tokens, schedule.sm),
        known_microseconds(problem.product(), tokens, schedule.sm),
    )
    if isinstance(chosen, MatvecTiles):
        return _matvec(linear, schedule, chosen)
    return _tile(linear, schedule, tokens, chosen, _share(linear.depth, chosen))


def _invariant(linear: Linear, schedule: Schedule, most: int) -> Value:
    """A product of up to `most` rows, each result of which is added up in a way that is the same for any number."""
    product = linear.problem(most).product()
    if not invariant_products(schedule.sm, product.dtype):
        sm = f"{schedule.sm // 10}.{schedule.sm % 10}"
        raise Refused(f"on compute capability {sm} products of tiles of two sizes are not known to have the same bits")
    sums = sums_of(product, schedule.sm)
    if most > MOST_TOKENS:
        return _blocks(linear, schedule, block_tiles(product, sums), sums)
    tokens = max(16, padded_tokens(most))
    return _tile(linear, schedule, tokens, few_tiles(product, tokens, schedule.sm), sums.share)


def padded_tokens(most: int) -> int:
    """The rows that a kernel works on for up to `most` of them: a tensor-core product has 16 columns at least."""
    return 1 if most == 1 else max(16, _power_from(most))


def _most_rows(linear: Linear, schedule: Schedule) -> int:
    """The most rows of x in a step of the bucket class: tokens, or fewer."""
    rows = linear.rows
    if isinstance(rows, str) and rows not in ("T", "L", "B"):
        raise Refused(f"a product for each of '{rows}' rows")
    return rows if isinstance(rows, int) else schedule.bucket.tokens[1]


def _check(linear: Linear) -> None:
    dtype = linear.x.type.dtype
    if dtype not in _DTYPES or linear.weight.type.dtype != dtype:
        raise Refused(f"a product of {linear.x.type} and {linear.weight.type}")
    if len(linear.x.type.shape) != 2:
        raise Refused(f"a product of {linear.x.type}, which is no matrix")
    for value in (linear.x, linear.weight, linear.residual):
        if value is not None and value.strides[-1] != 1:
            raise Refused(f"{value.type} is strided along its last axis")
    for value in (linear.bias, linear.norm.weight if linear.norm else None):
        if value is not None and value.strides != (1,):
            raise Refused(f"{value.type} is no dense vector")
    if linear.norm is not None and linear.depth > MOST_NORMED:
        raise Refused(f"a norm over {linear.depth} elements; {MOST_NORMED} fit in a program")


def _matvec(linear: Linear, schedule: Schedule, chosen: MatvecTiles) -> Value:
    result = schedule.output(linear.result)
    schedule.launch(
        linear_matvec,
        (-(-linear.columns // chosen.block_n), linear.rows),
        {
            "x": linear.x,
            "weight": linear.weight,
            "y": result,
            "gain": linear.norm.weight if linear.norm else None,
            "bias": linear.bias,
            "residual": linear.residual,
        },
        {
            **_constants(linear),
            "EPS": linear.norm.eps if linear.norm else 0.0,
            "NORM": linear.norm is not None,
            "X_STRIDE": linear.x.strides[0],
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "LINES": chosen.lines,
            "AHEAD": chosen.ahead,
            "WAVE": _EARLY * schedule.cores,
            "ROW_LINES": _power_from(-(-linear.depth * linear.weight.type.dtype.itemsize // 128)),
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        dependent=schedule.dependent,
    )
    return result


def _tile(linear: Linear, schedule: Schedule, tokens: int, chosen: Tiles, share: int) -> Value:
    x = linear.x if linear.norm is None else _normed(linear.x, linear.norm, schedule)
    result = schedule.output(linear.result)
    blocks = -(-linear.columns // chosen.block_n)
    split = chosen.splits > 1
    parts = 1 if linear.gate is None else 2
    sums = (chosen.splits, blocks, parts, chosen.block_n, tokens)
    schedule.launch(
        linear_tile,
        (blocks, chosen.splits),
        {
            "x": x,
            "weight": linear.weight,
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
            "partial": schedule.scratch(torch.float32, sums) if split else None,
            "arrivals": schedule.counter((blocks,)) if split else None,
            "rows": linear.rows,
        },
        {
            **_constants(linear),
            "X_STRIDE": x.strides[0],
            "TOKENS": tokens,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLITS": chosen.splits,
            "SHARE": share,
            "LINES": chosen.lines,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
    return result


def _blocks(linear: Linear, schedule: Schedule, chosen: BlockTiles, sums: Sums) -> Value:
    x = linear.x if linear.norm is None else _normed(linear.x, linear.norm, schedule)
    result = schedule.output(linear.result)
    schedule.launch(
        linear_blocks,
        (times(cdiv(linear.rows, chosen.tokens), -(-linear.columns // chosen.block_n)),),
        {
            "x": x,
            "weight": linear.weight,
            "y": result,
            "bias": linear.bias,
            "residual": linear.residual,
            "rows": linear.rows,
        },
        {
            **_constants(linear),
            "X_STRIDE": x.strides[0],
            "TOKENS": chosen.tokens,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLITS": sums.splits,
            "SHARE": sums.share,
            "TOGETHER": chosen.together,
            "DEPENDENT": schedule.dependent,
        },
        warps=chosen.warps,
        stages=chosen.stages,
        dependent=schedule.dependent,
    )
    return result


def _share(depth: int, chosen: Tiles) -> int:
    """Columns of the weight for each split, whole blocks of them."""
    return -(-depth // (chosen.splits * chosen.block_k)) * chosen.block_k


def _normed(x: Value, norm: Norm, schedule: Schedule) -> Value:
    """The norm in front of a product of several rows, as a launch of its own: the programs of the product share its
    rows, and each would read all of x twice to norm it by itself."""
    rows, depth = x.type.shape[0], _size(x.type.shape[1])
    normed = schedule.scratch(x.type.dtype, (rows, depth))
    groups = {"GROUPS": 1, "X_GROUP": 0, "RESIDUAL_GROUP": 0, "WEIGHT_GROUP": 0, "BLOCK_GROUPS": 1}
    schedule.launch(
        norm_kernel,
        (rows, 1),
        {"x": x, "residual": None, "weight": norm.weight, "total": None, "result": normed},
        {
            **groups,
            "WIDTH": depth,
            "X_ROW": x.strides[0],
            "RESIDUAL_ROW": 0,
            "EPS": norm.eps,
            "CENTRED": False,
            "BLOCK": _power_from(depth),
            "DEPENDENT": schedule.dependent,
        },
        warps=8,
        dependent=schedule.dependent,
    )
    return normed


def _constants(linear: Linear) -> dict[str, int | str | bool | None]:
    """What both kernels of the product are told in the same words."""
    gate = linear.gate
    return {
        "N": linear.columns,
        "K": linear.depth,
        "W_STRIDE": linear.weight.strides[0],
        "RESIDUAL_STRIDE": linear.residual.strides[0] if linear.residual else 0,
        "FIRST": gate.gate if gate else 0,
        "UP": gate.up if gate else 0,
        "ACTIVATION": gate.activation if gate else None,
        "BIAS": linear.bias is not None,
        "RESIDUAL": linear.residual is not None,
    }


def _power_from(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _size(size: int | str) -> int:
    if isinstance(size, str):
        raise Refused(f"a product over '{size}' elements, which no kernel is made for")
    return size


LOWERINGS: Mapping[str, Lowering] = {"linear": lower_linear}
