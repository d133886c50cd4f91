"""The ops of a dense decoder outside attention. Activations are [T, …], the tokens of all sequences flattened."""

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.ops.registry import Sample, define, rows_bytes, wide
from ingot.ir.placements import Call, Fit, by_heads, elementwise, whole
from ingot.ir.tables import make_table


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _embedding_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    ids = torch.randint(0, 50, (7,), generator=g, dtype=torch.int32)
    return [Sample((ids, _randn(g, dtype, 50, 24)))]


@define(
    rows=("tokens",),
    samples=_embedding_samples,
    flops=0,
    traffic=lambda tokens, weight: {"weight": rows_bytes(tokens, weight)},
    fusible=False,
    placement=whole,
)
def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [T, D] of token ids [T]: the rows of `weight` [V, D] with these indices."""
    return weight.index_select(0, tokens)


def _linear_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, w = _randn(g, dtype, 5, 48), _randn(g, dtype, 72, 48)
    return [Sample((x, w)), Sample((x, w, _randn(g, dtype, 72))), Sample((x[:1], w))]


def _linear_flops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    return 2 * x.numel() * weight.shape[0]


def _linear_placement(call: Call) -> Fit:
    """The placement rule of `linear` for a weight [N, K] on a mesh axis.

    A weight split along N splits the result. A weight split along K needs x split along K. The result is then a partial
    sum: the sum over the ranks is still to be added.
    """
    weight = call.at["weight"]
    last = len(call.types["x"].shape) - 1
    if weight is not None and weight.kind == "shard" and weight.dim == 0:
        bias = {"bias": weight} if "bias" in call.types else {}
        return Fit({"weight": weight, **bias}, call.shard(last, weight.segments))
    if weight == call.shard(1):
        check_bias(call)
        return Fit({"weight": weight, "x": call.shard(last)}, call.partial)
    return whole(call)


def check_bias(call: Call) -> None:
    """Raise VerifyError if a matmul with a bias would return a partial sum on each rank.

    The sum over the ranks would then contain the bias once per rank.
    """
    if "bias" in call.types:
        raise VerifyError("a bias on partial sums is added once by each rank", expected="an add after the all_reduce")


def _norm_placement(call: Call) -> Fit:
    """The placement rule of norms: x may be split along any dim but the last, over which the norm runs.

    A weight with one row per head is split by heads, together with x.
    """
    x = call.at["x"]
    if len(call.types["weight"].shape) == 2:
        if call.is_shard("x", 1) or call.is_shard("weight", 0):
            bias = {"bias": call.shard(0)} if "bias" in call.types else {}
            return Fit({"x": call.shard(1), "weight": call.shard(0), **bias}, call.shard(1))
        return whole(call)
    if x is not None and x.kind == "shard" and x.dim < len(call.types["x"].shape) - 1:
        return Fit({"x": x}, x)
    return whole(call)


def _add_norm_placement(call: Call) -> Fit:
    """The placement rule of `add_rms_norm`: the rows of both addends may be split over ranks."""
    if call.is_shard("x", 0) or call.is_shard("residual", 0):
        rows = call.shard(0)
        return Fit({"x": rows, "residual": rows}, (rows, rows))
    return whole(call)


def _rope_placement(call: Call) -> Fit:
    return Fit({"x": call.shard(1)}, call.shard(1)) if call.is_shard("x", 1) else whole(call)


def _select_rows_placement(call: Call) -> Fit:
    x = call.at["x"]
    return Fit({"x": x}, x) if x is not None and (x.kind == "partial" or x.dim > 0) else whole(call)


@define(
    rows=("x",),
    samples=_linear_samples,
    flops=_linear_flops,
    multiplies=True,
    placement=_linear_placement,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` [T, N] in x's dtype, for x [T, K], weight [N, K] and bias [N].

    For 16-bit dtypes, sums are accumulated in a wider dtype.
    """
    return F.linear(x, weight, bias)


def _head_linear_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, w = _randn(g, dtype, 5, 4, 24), _randn(g, dtype, 4, 16, 24)
    return [Sample((x, w)), Sample((x[:1], w)), Sample((x[:, :2], w[1:3]))]


def _head_linear_placement(call: Call) -> Fit:
    return by_heads(call, {"x": 1, "weight": 0}, call.shard(1))


@define(
    rows=("x",),
    samples=_head_linear_samples,
    flops=lambda x, weight: 2 * x.shape[0] * weight.numel(),
    multiplies=True,
    needs_kernel=True,
    placement=_head_linear_placement,
)
def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x[:, h] @ weight[h].T` of each head h: [T, H, N] in x's dtype, for x [T, H, K] and weight [H, N, K].

    For 16-bit dtypes, sums are accumulated in a wider dtype. Raises VerifyError if heads or widths differ.
    """
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != (weight.shape[0], weight.shape[2]):
        raise VerifyError(
            f"heads {list(x.shape)} and matrices {list(weight.shape)}", expected="[T, H, K] and [H, N, K]"
        )
    by_head = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))
    return by_head.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # row-major also for a single token


def _norm_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x = _randn(g, dtype, 6, 40)
    heads = _randn(g, dtype, 3, 4, 16)
    return [
        Sample((x, _randn(g, dtype, 40)), {"eps": 1e-5}),
        Sample((heads * 100, _randn(g, dtype, 16)), {"eps": 1e-6}),
    ]


@define(rows=("x",), samples=_norm_samples, flops=1, placement=_norm_placement)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Return `x / rms(x)` over the last axis, times `weight` [D], in x's dtype (arXiv 1910.07467).

    `eps` is added to the mean square. If the weight has x's dtype, the quotient is rounded to it before the
    multiplication. Otherwise only the final result is rounded.
    """
    full = wide(x)
    normed = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)
    return _scaled(normed, weight, x.dtype)


def _scaled(normed: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return normed.to(dtype) * weight if weight.dtype == dtype else (normed * weight).to(dtype)


def _layer_norm_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    heads, gains = _randn(g, dtype, 3, 4, 16), _randn(g, torch.float32, 4, 16)
    return [
        Sample((_randn(g, dtype, 6, 40) + 3, _randn(g, dtype, 40)), {"eps": 1e-5}),
        Sample((heads, gains), {"eps": 1e-5}),
        Sample((_randn(g, dtype, 6, 40) + 3, _randn(g, dtype, 40), _randn(g, dtype, 40)), {"eps": 1e-5}),
    ]


@define(rows=("x",), samples=_layer_norm_samples, flops=1, placement=_norm_placement)
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float) -> torch.Tensor:
    """Return `(x - mean(x)) / std(x)` over the last axis, times `weight`, plus `bias` (arXiv 1607.06450).

    `weight` is [D] or [H, D]. `bias` has the weight's shape and dtype. `eps` is added to the variance. The result has
    x's dtype. Without a bias and with a weight of x's dtype, the quotient is rounded before the multiplication.
    Otherwise only the final result is rounded.
    """
    full = wide(x)
    centred = full - full.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return _scaled(normed, weight, x.dtype) if bias is None else (normed * wide(weight) + wide(bias)).to(x.dtype)


def _add_norm_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 6, 40), _randn(g, dtype, 6, 40), _randn(g, dtype, 40)), {"eps": 1e-5})]


def _decompose_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.ops.aten.add.Tensor(x, residual)
    return rms_norm(total, weight, eps=eps), total


@define(
    rows=("x", "residual"),
    samples=_add_norm_samples,
    decompose=_decompose_add_rms_norm,
    flops=1,
    placement=_add_norm_placement,
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(s), s), both [T, D], for the sum `s = x + residual`.

    s is rounded to x's dtype. `weight` [D] and `eps` belong to the norm.
    """
    total = x + residual
    return rms_norm.reference(total, weight, eps=eps), total


def rope_flops(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, **_: object) -> int:
    return 3 * x[..., 0].numel() * table.shape[1]  # two multiplications and an addition per rotated element


def _rope_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    positions = torch.tensor([0, 1, 63, 17], dtype=torch.int32)
    attrs = {"kind": "rope", "rope_type": "default", "positions": 64, "theta": 10000.0}
    full, part = make_table({**attrs, "rotary_dim": 16}), make_table({**attrs, "rotary_dim": 8})
    x = _randn(g, dtype, 4, 3, 16)
    tables = [Sample((x, positions, full)), Sample((x, positions, part))]
    return [*tables, Sample((x, positions, part), {"interleaved": True})]


@define(
    rows=("x", "positions"),
    samples=_rope_samples,
    flops=rope_flops,
    traffic=lambda x, positions, table, **_: {"table": rows_bytes(positions, table)},
    placement=_rope_placement,
)
def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate x [T, H, D] by the rotary embedding of `positions` [T] (arXiv 2104.09864).

    `table` f32[N, R] has a row per position: R/2 cosines, then R/2 sines. R is even and at most D. The last D - R
    elements of a head do not change. Element i is rotated with element i + R/2 (NeoX order). If `interleaved`, element
    2i is rotated with element 2i + 1 (GPT-J order).
    """
    rotary = table.shape[1]
    half = rotary // 2
    angles = table.index_select(0, positions).unsqueeze(1).to(wide(x).dtype)
    cos, sin = angles[..., :half], angles[..., half:]
    full = wide(x)
    if interleaved:
        first, second = full[..., 0:rotary:2], full[..., 1:rotary:2]
        parts = [torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)]
    else:
        first, second = full[..., :half], full[..., half:rotary]
        parts = [first * cos - second * sin, second * cos + first * sin]
    if rotary < x.shape[-1]:
        parts.append(full[..., rotary:])
    return torch.cat(parts, -1).to(x.dtype)


def _select_rows_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 6, 12), torch.tensor([5, 0, 2], dtype=torch.int32)))]


@define(
    rows=("rows",),
    samples=_select_rows_samples,
    flops=0,
    traffic=lambda x, rows: {"x": rows_bytes(rows, x)},
    fusible=False,
    placement=_select_rows_placement,
)
def select_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of x [T, …] that `rows` [L] lists by index, as a tensor [L, …]."""
    return x.index_select(0, rows)


def _cast_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    return [Sample((_randn(g, dtype, 3, 8),), {"dtype": torch.float32})]


@define(rows=("x",), samples=_cast_samples, flops=1, placement=elementwise)
def cast(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return x rounded to another dtype. Passes never move or remove a cast, because that would change the rounding."""
    # `copy=True`: an op's result never aliases its input, whatever the dtype.
    return x.to(dtype, copy=True)
