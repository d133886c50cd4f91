"""The fused op of q/k norm, rotary embedding, cache write and attention: all between the q/k/v and output matmuls."""

from collections.abc import Callable
from typing import Any

import torch

from ingot.ir.cache.dtype import CacheScales, check_cache_dtype
from ingot.ir.cache.form import CacheForm
from ingot.ir.masks import CAUSAL
from ingot.ir.ops.attention import like_q, slopes_sample, stated_options
from ingot.ir.ops.paged_attention import paged_attention
from ingot.ir.ops.registry import Sample, define
from ingot.ir.ops.rope_append import qk_norm_rope_append
from ingot.ir.placements import Call, Fit, by_heads
from ingot.ir.tables import make_table


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # Two sequences of 20 and 9 positions, with three tokens and one in the step, and padding between and after them.
    q, k, v = (part.view(6, -1, 16) for part in randn(6, 8 * 16).split([64, 32, 32], 1))
    pages, attrs = ints(3, 0, 5, 1).view(2, 2), {"rope_type": "default", "positions": 64, "theta": 1e4}
    table = make_table({"kind": "rope", **attrs, "rotary_dim": 16})
    slots = torch.tensor([0 * 16 + 1, 0 * 16 + 2, 0 * 16 + 3, -1, 5 * 16 + 8, -1])
    step = (ints(17, 18, 19, 0, 8, 0), table, slots, pages, ints(0, 4), ints(3, 1), ints(20, 9))
    args = (randn(6, 2, 16, 2, 16), q, k, v, *step)
    return [
        Sample(args, {"eps": 1e-6, "scale": 0.25}),
        Sample(
            (*args, randn(16), randn(16), randn(4)),
            {"eps": 1e-6, "interleaved": True, "scale": 0.25, "mask": "window_5", "soft_cap": 2.0},
        ),
        Sample(args, {"eps": 1e-6, "scale": 0.25, "mask": "chunked_4"}),
        Sample((*args, randn(16), randn(16)), {"eps": 1e-6, "norm_last": True, "scale": 0.25}),
        Sample((*args, None, None, None, None, slopes_sample(4)), {"eps": 1e-6, "scale": 0.25}),
    ]


def _write(call: dict[str, Any], function: Callable[..., Any]) -> Any:
    """Call `function`, which writes k and v to the cache, with its arguments from `call`.

    `function` is the op `qk_norm_rope_append` or a variant of it, such as its in-place form. `call` holds all arguments
    of `append_attention` by parameter name.
    """
    names = ("kv", "q", "k", "v", "positions", "table", "slots")
    norms = () if call["q_weight"] is None else (call["q_weight"], call["k_weight"])
    order = {name: True for name in ("interleaved", "norm_last") if call[name]}
    scales = CacheScales.of(call).options()
    return function(*(call[name] for name in names), *norms, eps=call["eps"], **order, **scales)


def _read(call: dict[str, Any], function: Callable[..., Any], q: Any, kv: Any) -> Any:
    """Call `function`, which computes attention over the cache, with its arguments from `call`.

    `function` is the op `paged_attention` or a variant of it, such as its row-by-row form. `call` holds all arguments
    of `append_attention` by parameter name. `q` and `kv` are the results of `qk_norm_rope_append`.
    """
    names = ("page_table", "q_starts", "q_lens", "kv_lens")
    last = [call["sinks"], None, call["sharing"], call["slopes"]]
    while last and last[-1] is None:
        last.pop()
    return function(q, kv, *(call[name] for name in names), *last, scale=call["scale"], **stated_options(call))


def _decompose(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = append_attention.bind(args, kwargs)
    q, kv = _write(call, qk_norm_rope_append)
    return _read(call, paged_attention, q, kv), kv


def _rowwise(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = append_attention.bind(args, kwargs)
    q, kv = _write(call, qk_norm_rope_append.rowwise)
    return _read(call, paged_attention.rowwise, q, kv), kv


def _in_place(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = append_attention.bind(args, kwargs)
    assert qk_norm_rope_append.in_place is not None
    q = _write(call, qk_norm_rope_append.in_place)
    return _attention(_read(call, paged_attention.reference, q, call["kv"]))


def _costliest(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = append_attention.bind(args, kwargs)
    q = _write(call, qk_norm_rope_append.costliest)
    return _attention(_read(call, paged_attention.costliest, q, call["kv"]))


def _attention(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _fake(
    kv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = CacheScales(options.get("k_scale", 1.0), options.get("v_scale", 1.0), options.get("per_token", False))
    check_cache_dtype(kv, k, scales)
    CacheForm.check_equal(kv, k, v, per_token=scales.per_token)
    return like_q(q, **options), torch.empty_like(kv)


def _flops(*args: Any, **kwargs: Any) -> float:
    call = append_attention.bind(args, kwargs)
    assert callable(qk_norm_rope_append.flops) and callable(paged_attention.flops)
    first: int = _write(call, qk_norm_rope_append.flops)
    last: float = _read(call, paged_attention.flops, call["q"], call["kv"])
    return first + last


def _traffic(*args: Any, **kwargs: Any) -> dict[str, float]:
    """Return the bytes that a call writes and then reads of the cache, and reads of the table."""
    call = append_attention.bind(args, kwargs)
    assert qk_norm_rope_append.traffic is not None and paged_attention.traffic is not None
    written: dict[str, float] = _write(call, qk_norm_rope_append.traffic)
    read: dict[str, float] = _read(call, paged_attention.traffic, call["q"], call["kv"])
    return written | {"kv": written["kv"] + read["kv"]}


def _placement(call: Call) -> Fit:
    dims = {"kv": 3, "q": 1, "k": 1, "v": 1, "sinks": 0, "slopes": 0}
    return by_heads(call, dims, (call.shard(1), call.shard(3)))


@define(
    samples=_samples,
    rowwise=_rowwise,
    fake=_fake,
    states=("kv",),
    in_place=_in_place,
    costliest=_costliest,
    decompose=_decompose,
    flops=_flops,
    traffic=_traffic,
    fusible=False,
    needs_kernel=True,
    placement=_placement,
)
def append_attention(
    kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sharing: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    *,
    eps: float,
    interleaved: bool = False,
    norm_last: bool = False,
    scale: float,
    mask: str = CAUSAL.name,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    per_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate q and k, write k and v to the cache, and return (attention of q [T, H, D], new cache).

    The op fuses `qk_norm_rope_append` and `paged_attention`. These two ops explain all arguments. `table` holds the
    rotary cosines and sines. `q_weight` and `k_weight` are the weights of the norms. Tokens `q_starts[b]` to
    `q_starts[b] + q_lens[b]` of the step belong to sequence b. Their positions are the last of its `kv_lens[b]`
    positions. For each token, `slots` and `page_table` must name the same place in the cache.

    A backend may read the step's tokens from k and v, and earlier tokens from the cache. It must first round k and v to
    the cache's dtype, with its scales. So results do not depend on how a prompt is cut into chunks.
    """
    scales = CacheScales(k_scale, v_scale, per_token).options()
    order = {"interleaved": interleaved, "norm_last": norm_last}
    prepared, written = qk_norm_rope_append.reference(
        kv, q, k, v, positions, table, slots, q_weight, k_weight, eps=eps, **order, **scales
    )
    lens = (page_table, q_starts, q_lens, kv_lens)
    return (
        paged_attention.reference(
            prepared, written, *lens, sinks, None, sharing, slopes, scale=scale, mask=mask, soft_cap=soft_cap, **scales
        ),
        written,
    )
