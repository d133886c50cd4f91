"""Multi-head latent attention against transformers' module and against its absorbed form."""

from typing import Any

import pytest
import torch
from op_values import F32, F64, check, every_dtype, generator, ints, randn, widened
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS

HEADS, INNER, ROTATED, RANK, VALUE = 4, 10, 6, 14, 9


def arguments(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """Two sequences of five and three tokens."""
    g = generator(seed)
    q, q_rotated = randn(g, dtype, 8, HEADS, INNER), randn(g, dtype, 8, HEADS, ROTATED)
    latents, k_rotated = randn(g, dtype, 8, 1, RANK), randn(g, dtype, 8, 1, ROTATED)
    k_up, v_up = (randn(g, F64, HEADS, size, RANK).mul(RANK**-0.5).to(dtype) for size in (INNER, VALUE))
    rows = ints(0, 1, 2, 3, 4, 0, 1, 2), ints(0, 0, 0, 0, 0, 1, 1, 1)
    return [q, q_rotated, latents, k_rotated, k_up, v_up, *rows]


@every_dtype
def test_it_is_transformers_attention(dtype: torch.dtype) -> None:
    """Keys and values of each head as `expand_kv` makes them, and softmax attention over them."""
    args = arguments(dtype)
    found = OPS["latent_attention"].reference(*args, scale=0.3, layer=0)
    q, q_rotated, latents, k_rotated, k_up, v_up, *_ = widened(args)
    config = deepseek_v3.DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        qk_nope_head_dim=INNER,
        qk_rope_head_dim=ROTATED,
        kv_lora_rank=RANK,
        v_head_dim=VALUE,
    )
    theirs = deepseek_v3.DeepseekV3Attention(config, 0).double()
    theirs.kv_b_proj.weight.data.copy_(torch.cat([k_up, v_up], 1).flatten(0, 1))
    for begin, end in ((0, 5), (5, 8)):
        rows = slice(begin, end)
        with torch.no_grad():
            k, v = theirs.expand_kv(latents[rows].transpose(0, 1)[None], k_rotated[rows].transpose(0, 1)[None])
        whole = torch.cat([q, q_rotated], -1)[rows].transpose(0, 1)[None]
        expected = torch.nn.functional.scaled_dot_product_attention(whole, k, v, is_causal=True, scale=0.3)
        # In 16 bits keys and values are rounded too.
        check(found[rows], expected[0].transpose(0, 1), dtype, 1 if dtype in (F32, F64) else 4)


@pytest.mark.parametrize("mask", ["causal", "window_2", "bidirectional"])
def test_the_absorbed_form_is_the_same(mask: str) -> None:
    """One key for all heads: the latent and the rotated key. The identity that the pass absorb-latents uses."""
    args = arguments(F64, seed=1)
    q, q_rotated, latents, k_rotated, k_up, v_up, *rows = args
    expected = OPS["latent_attention"].reference(*args, scale=0.3, layer=0, mask=mask)
    by_latent = torch.einsum("thn,hnc->thc", q, k_up)
    queries, keys = torch.cat([by_latent, q_rotated], -1), torch.cat([latents, k_rotated], -1)
    options = {"scale": 0.3, "layer": 0, "mask": mask}
    mixed = OPS["attention"].reference(queries, keys, None, *rows, **options, value_width=RANK)
    check(torch.einsum("thc,hvc->thv", mixed, v_up), expected, F64, 10)  # sums in another order, three times
    check(OPS["latent_attention"].rowwise(*args, **options), expected, F64)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("q", (8, HEADS, INNER + 1), "matrices"),
        ("q_rotated", (8, HEADS, ROTATED - 2), "rotated parts"),
        ("q_rotated", (8, 1, ROTATED), "rotated parts"),
        ("latents", (8, HEADS, RANK), "latents"),
        ("latents", (8, 1, RANK + 1), "matrices"),
        ("k_rotated", (8, HEADS, ROTATED), "latents"),
        ("k_up", (HEADS, RANK, INNER), "matrices"),
        ("k_up", (HEADS - 1, INNER, RANK), "matrices"),
        ("v_up", (HEADS, RANK, VALUE), "matrices"),
        ("v_up", (1, VALUE, RANK), "matrices"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], problem: str) -> None:
    op = OPS["latent_attention"]
    named = dict(zip(op.parameters.names, arguments(F32), strict=False)) | {name: torch.zeros(shape)}
    for function in (op.reference, op.fake):
        with pytest.raises(VerifyError, match=problem):
            function(**named, scale=1.0, layer=0)


@pytest.mark.parametrize("mask", ["tree", "sideways"])
def test_unknown_masks_are_refused(mask: str) -> None:
    with pytest.raises(VerifyError, match=mask):
        OPS["latent_attention"].fake(*arguments(F32), scale=1.0, layer=0, mask=mask)


def test_flops_count_matrices_and_attention() -> None:
    """An upper bound: all eight tokens as one sequence."""
    matrices = 8 * HEADS * RANK * (INNER + VALUE)
    attention = 8 * 8 * HEADS * (INNER + ROTATED + VALUE)
    assert OPS["latent_attention"].cost(*arguments(F32), scale=1.0, layer=0).flops == 2 * (matrices + attention)
