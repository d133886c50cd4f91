"""Multi-head latent attention over the tokens of a step, as traced, in its plain form: each head has keys and values.

A pass absorbs the matrices that make keys and values of latents, so that caches hold latents.
"""

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.masks import CAUSAL
from ingot.ir.ops.attention import attention, check_chosen, check_mask
from ingot.ir.ops.dense import head_linear
from ingot.ir.ops.registry import Sample, define
from ingot.ir.placements import Call, Fit, by_heads


def _by_token(tensor: torch.Tensor) -> str:
    """Return the shape of a tensor with a row per token as text, such as "[T, 4, 16]"."""
    return f"[{', '.join(('T', *map(str, tensor.shape[1:])))}]"


def _check(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    latents: torch.Tensor,
    k_rotated: torch.Tensor,
    k_up: torch.Tensor,
    v_up: torch.Tensor,
) -> None:
    """Raise VerifyError unless the sizes of the arguments of `latent_attention` fit together."""
    heads, inner = q.shape[1:]
    rank = latents.shape[-1]
    if latents.shape[1:-1] != (1,) or k_rotated.shape[1:-1] != (1,):
        raise VerifyError(
            f"latents {_by_token(latents)} and rotated keys {_by_token(k_rotated)}",
            expected="one row per token for all heads: [T, 1, C] and [T, 1, R]",
        )
    if q_rotated.shape[1:] != (heads, k_rotated.shape[-1]):
        raise VerifyError(
            f"rotated parts of q {_by_token(q_rotated)} and of keys {_by_token(k_rotated)}",
            expected=f"[T, {heads}, R] and [T, 1, R]",
        )
    if tuple(k_up.shape) != (heads, inner, rank) or (v_up.shape[0], v_up.shape[-1]) != (heads, rank):
        raise VerifyError(
            f"matrices {list(k_up.shape)} of keys and {list(v_up.shape)} of values",
            expected=f"[{heads}, {inner}, {rank}] and [{heads}, V, {rank}]",
        )


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    positions = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    seqs = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    matrices = (randn(4, 8, 20) * 0.3).to(dtype), (randn(4, 6, 20) * 0.3).to(dtype)
    args = (randn(5, 4, 8), randn(5, 4, 12), randn(5, 1, 20), randn(5, 1, 12), *matrices, positions, seqs)
    chosen = torch.tensor([[0, -1], [0, 1], [0, 2], [0, -1], [1, -1]], dtype=torch.int32)
    return [
        Sample(args, {"scale": 0.25, "layer": 0}),
        Sample(args, {"scale": 0.25, "layer": 1, "mask": "window_2"}),
        Sample((*args, chosen), {"scale": 0.25, "layer": 0}),
    ]


def _decompressed(
    latents: torch.Tensor, k_rotated: torch.Tensor, k_up: torch.Tensor, v_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [T, H, N + R] and values [T, H, V] of each head. The arguments are those of `latent_attention`.

    The matrices multiply token by token, so that the bits of a token do not depend on the other tokens.
    """
    heads = k_up.shape[0]
    by_head = latents.expand(-1, heads, -1)
    k = head_linear.rowwise(by_head, k_up)
    return torch.cat([k, k_rotated.expand(-1, heads, -1)], -1), head_linear.rowwise(by_head, v_up)


def _rowwise(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    latents: torch.Tensor,
    k_rotated: torch.Tensor,
    k_up: torch.Tensor,
    v_up: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    chosen: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    mask: str = CAUSAL.name,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    k, v = _decompressed(latents, k_rotated, k_up, v_up)
    whole = torch.cat([q, q_rotated], -1)
    rows, options = (positions, token_seqs, None, None, chosen), {"scale": scale, "layer": layer, "mask": mask}
    found: torch.Tensor = attention.rowwise(whole, k, v, *rows, **options)
    return found


def _fake(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    latents: torch.Tensor,
    k_rotated: torch.Tensor,
    k_up: torch.Tensor,
    v_up: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    chosen: torch.Tensor | None = None,
    *,
    mask: str = CAUSAL.name,
    **_: object,
) -> torch.Tensor:
    """Return an empty result of `latent_attention`. Raises VerifyError for an unknown mask or sizes that do not fit."""
    check_mask(mask, None)
    _check(q, q_rotated, latents, k_rotated, k_up, v_up)
    check_chosen(q, chosen)
    return q.new_empty(*q.shape[:2], v_up.shape[1])


def _flops(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    latents: torch.Tensor,
    k_rotated: torch.Tensor,
    k_up: torch.Tensor,
    v_up: torch.Tensor,
    *_: object,
    **__: object,
) -> int:
    # An upper bound: treats all tokens as one unmasked sequence.
    tokens, widths = q.shape[0], q.shape[2] + q_rotated.shape[2] + v_up.shape[1]
    return 2 * tokens * (k_up.numel() + v_up.numel() + q.shape[1] * widths * tokens)


def _placement(call: Call) -> Fit:
    """The placement rule of `latent_attention`: a mesh axis splits the heads. Every rank has all latents."""
    return by_heads(call, {"q": 1, "q_rotated": 1, "k_up": 0, "v_up": 0}, call.shard(1))


@define(
    samples=_samples,
    rows=("q", "q_rotated"),
    rowwise=_rowwise,
    fake=_fake,
    flops=_flops,
    fusible=False,
    legal="pure",
    placement=_placement,
)
def latent_attention(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    latents: torch.Tensor,
    k_rotated: torch.Tensor,
    k_up: torch.Tensor,
    v_up: torch.Tensor,
    positions: torch.Tensor,
    token_seqs: torch.Tensor,
    chosen: torch.Tensor | None = None,
    *,
    scale: float,
    layer: int,
    mask: str = CAUSAL.name,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return multi-head latent attention [T, H, V] within each sequence (arXiv 2405.04434).

    A token has one latent, `latents` [T, 1, C], for all heads. The key of head h is `latents @ k_up[h].T`, followed by
    `k_rotated` [T, 1, R], which carries the position. Its value is `latents @ v_up[h].T`. `k_up` is [H, N, C] and
    `v_up` [H, V, C]. Keys and values are rounded. The query of head h is `q` [T, H, N], followed by `q_rotated`
    [T, H, R].

    The arguments `positions`, `token_seqs`, `chosen`, `scale`, `layer` and `mask` are those of `attention`. `layer` and
    the scales do not change this op's result. They are for a cache, which stores the latent and the rotated key of each
    token as one row. `k_scale` is the scale of this row in a cache of f8e4m3, and `v_scale` is not used.

    Raises VerifyError for an unknown mask, and for sizes that do not fit.
    """
    _check(q, q_rotated, latents, k_rotated, k_up, v_up)
    by_head = latents.expand(-1, k_up.shape[0], -1)
    k = head_linear.reference(by_head, k_up)
    v = head_linear.reference(by_head, v_up)
    found: torch.Tensor = attention.reference(
        torch.cat([q, q_rotated], -1),
        torch.cat([k, k_rotated.expand(-1, k_up.shape[0], -1)], -1),
        v,
        positions,
        token_seqs,
        None,
        None,
        chosen,
        scale=scale,
        layer=layer,
        mask=mask,
    )
    return found
