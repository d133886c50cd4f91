"""The op of latent attention in steps of prompts: over the step's own keys and values of each head, after a first part.

With the other part from `partial_attention` over cached latents, it computes the same as attention over all latents.
Keys and values of each head take a third of the operations of latents per query and key, and must be computed. So they
pay for the tokens of a step, and not for all cached ones.
"""

from typing import Any

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops.attention import attention_scores, weighted_values
from ingot.ir.ops.registry import Sample, define, own_row, wide
from ingot.ir.placements import Call, Fit, by_heads

_QUERIES = ("q", "q_rotated", "before", "before_lse")


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    """Return a sample call with sequences of 3, 0 and 2 tokens, a token of no sequence, and a first part for some."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    starts, lens = (torch.tensor(one, dtype=torch.int32) for one in ((0, 0, 3), (3, 0, 2)))
    before, lse = randn(6, 4, 10), torch.randn(6, 4, generator=g) + 1
    before[3:], lse[3:] = 0, float("-inf")
    args = (randn(6, 4, 16), randn(6, 4, 6), randn(6, 4, 16), randn(6, 1, 6), randn(6, 4, 10), starts, lens)
    return [Sample((*args, before, lse), {"scale": 0.25})]


def _check(call: dict[str, Any]) -> None:
    """Raise VerifyError unless the sizes of the arguments of `step_latent_attention` fit together."""
    q, v, shapes = call["q"], call["v"], {name: tuple(one.shape) for name, one in call.items() if name != "scale"}
    tokens, heads, rotated = q.shape[0], q.shape[1], call["q_rotated"].shape[-1]
    wanted = {
        "q_rotated": (tokens, heads, rotated),
        "k": tuple(q.shape),
        "k_rotated": (tokens, 1, rotated),
        "v": (tokens, heads, v.shape[-1]),
        "before": (tokens, heads, v.shape[-1]),
        "before_lse": (tokens, heads),
    }
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise VerifyError(
                f"{name} {list(shapes[name])} for q {list(q.shape)}, q_rotated {list(shapes['q_rotated'])} and v "
                f"{list(v.shape)}",
                where="ingot.step_latent_attention",
                expected=str(list(shape)),
            )


def _attend(queries: dict[str, torch.Tensor], first: int, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
    """Return the attention [n, H, V] of some tokens of a sequence, merged with the part before the step.

    `queries` are the rows of these tokens, by parameter name. The first of them is token number `first` of the sequence
    in the step. k [m, H, D] and v [m, H, V] are the sequence's keys and values of the step.
    """
    q = torch.cat([queries["q"], queries["q_rotated"]], -1)
    places = torch.arange(max(len(k), first + len(q)), device=q.device)
    seen = places[None, : len(k)] <= places[first : first + len(q), None]
    scores = attention_scores(q, k, seen, scale, None, None)  # [H, 1, n, m]
    lse = queries["before_lse"].to(scores.dtype).T[:, None, :, None]
    weights = torch.cat([scores, lse], -1).softmax(-1)
    before = wide(queries["before"]) * weights[:, 0, :, -1].T[..., None]
    return (weighted_values(wide(q), weights[..., :-1], wide(v), 1.0) + before).to(q.dtype)


def _keys(call: dict[str, Any], own: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole keys [m, H, N + R] and values [m, H, V] of the tokens `own`."""
    k = call["k"][own]
    return torch.cat([k, call["k_rotated"][own].expand(-1, k.shape[1], -1)], -1), call["v"][own]


def _rowwise(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = step_latent_attention.bind(args, kwargs)
    out = torch.zeros_like(call["v"], memory_format=torch.contiguous_format)
    for start, count in zip(call["q_starts"].tolist(), call["q_lens"].tolist(), strict=True):
        for row in range(start, start + count):
            queries = {name: own_row(call[name], row) for name in _QUERIES}
            out[row : row + 1] = _attend(queries, row - start, *_keys(call, slice(start, row + 1)), call["scale"])
    return out


def _fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = step_latent_attention.bind(args, kwargs)
    _check(call)
    v: torch.Tensor = call["v"]
    return v.new_empty(v.shape)


def _flops(
    q: torch.Tensor, q_rotated: torch.Tensor, k: torch.Tensor, k_rotated: torch.Tensor, *rest: Any, **_: Any
) -> float:
    """Return the operations of both matmuls, for sequences of equal length."""
    v, q_starts = rest[:2]
    seen = (q.shape[0] / q_starts.shape[0] + 1) / 2
    return float(2 * seen * (q.numel() + q_rotated.numel() + v.numel()))


def _costliest(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Allocate the most memory that a call can need: all tokens belong to one sequence."""
    call = step_latent_attention.bind(args, kwargs)
    found: torch.Tensor = _attend({name: call[name] for name in _QUERIES}, 0, *_keys(call, slice(None)), call["scale"])
    return found


def _placement(call: Call) -> Fit:
    """The placement rule of `step_latent_attention`: a mesh axis splits the heads. Every rank has all rotated keys."""
    return by_heads(call, dict.fromkeys(("q", "q_rotated", "k", "v", "before", "before_lse"), 1), call.shard(1))


@define(
    samples=_samples,
    rows=_QUERIES,
    rowwise=_rowwise,
    fake=_fake,
    flops=_flops,
    costliest=_costliest,
    fusible=False,
    needs_kernel=True,
    legal="cached",
    placement=_placement,
)
def step_latent_attention(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    k: torch.Tensor,
    k_rotated: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    q_lens: torch.Tensor,
    before: torch.Tensor,
    before_lse: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Return causal attention [T, H, V] within each sequence of the step, merged with the part `before` the step.

    The query of head h is `q` [T, H, N], followed by `q_rotated` [T, H, R]. Its key is `k` [T, H, N], followed by
    `k_rotated` [T, 1, R], which all heads share. Its value is `v` [T, H, V]. Tokens `q_starts[b]` to `q_starts[b] +
    q_lens[b]` belong to sequence b. The rows of padding tokens are zero.

    `before` [T, H, V] is the attention of each token over the earlier positions of its sequence, and `before_lse`
    f32[T, H] the logarithm of the sum of its weights. A log-sum-exp of -inf means that there are none.

    Raises VerifyError for sizes that do not fit.
    """
    call = step_latent_attention.bind(
        (q, q_rotated, k, k_rotated, v, q_starts, q_lens, before, before_lse), {"scale": scale}
    )
    _check(call)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for start, count in zip(q_starts.tolist(), q_lens.tolist(), strict=True):
        if count:
            own = slice(start, start + count)
            out[own] = _attend({name: call[name][own] for name in _QUERIES}, 0, *_keys(call, own), scale)
    return out
