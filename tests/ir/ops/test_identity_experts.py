"""Experts that return their input, and choices that `experts` leaves out, against transformers' LongCat-Flash."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_values import F32, FLOATS, check, generator, randn
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from ingot.ir import ops
from ingot.ir.errors import VerifyError

TOKENS, EXPERTS, OTHERS, TOP_K, HIDDEN, WIDTH = 9, 4, 3, 5, 24, 20


def _drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and choices of a router, and the matrices. Token 0 chooses all others, token 1 only two."""
    g = generator(7)
    order = torch.rand(TOKENS, EXPERTS + OTHERS, generator=g).argsort(-1)
    order[0] = torch.tensor([6, 0, 4, 1, 5, 2, 3])
    order[1] = torch.tensor([3, 5, 1, 0, 2, 4, 6])
    weights = torch.rand(TOKENS, TOP_K, generator=g)
    matrices = randn(g, dtype, EXPERTS, 2 * WIDTH, HIDDEN), randn(g, dtype, EXPERTS, HIDDEN, WIDTH)
    return randn(g, dtype, TOKENS, HIDDEN), weights, order[:, :TOP_K].int().contiguous(), *matrices


def _by_transformers(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """In float64. What transformers holds of experts that return their input is NaN."""
    sizes = {"expert_ffn_hidden_size": WIDTH, "hidden_size": HIDDEN, "hidden_act": "silu"}
    made = LongcatFlashExperts(SimpleNamespace(**sizes, n_routed_experts=EXPERTS, zero_expert_num=OTHERS)).double()
    unread = torch.full((OTHERS, *gate_up.shape[1:]), torch.nan, dtype=torch.float64)
    made.gate_up_proj.data, made.down_proj.data = torch.cat([gate_up.double(), unread]), down.double()
    with torch.no_grad():
        return made(x.double(), chosen.long(), weights.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_parts_are_transformers(dtype: torch.dtype) -> None:
    x, weights, chosen, *matrices = _drawn(dtype)
    for part in ("reference", "rowwise"):
        own = getattr(ops.experts, part)(x, weights, chosen, *matrices, others=OTHERS)
        others = getattr(ops.identity_experts, part)(x, weights, chosen, experts=EXPERTS)
        expected = _by_transformers(x, weights, chosen, *matrices).to(dtype)
        check(own.double().add(others.double()).to(dtype), expected, dtype, HIDDEN + WIDTH)


def test_only_choices_of_others_count() -> None:
    x, weights, chosen, *matrices = _drawn(F32)
    alone = torch.full_like(chosen, EXPERTS)
    assert not ops.experts.reference(x, weights, alone, *matrices, others=OTHERS).any()
    assert torch.equal(
        ops.identity_experts.reference(x, weights, chosen, experts=EXPERTS + OTHERS), torch.zeros_like(x)
    )
    share = weights.sum(-1, keepdim=True)
    assert torch.allclose(ops.identity_experts.reference(x, weights, alone, experts=EXPERTS), x * share)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"experts": 0}, "0 experts with weights"),
        ({"chosen": torch.zeros(TOKENS, TOP_K)}, "experts torch.float32"),
        ({"weights": torch.zeros(TOKENS, 2)}, r"weights \[9, 2\]"),
        ({"x": torch.zeros(2, HIDDEN)}, "with T = 2"),
    ],
)
def test_refuses(changes: dict[str, Any], what: str) -> None:
    x, weights, chosen, *_ = _drawn(F32)
    with pytest.raises(VerifyError, match=what):
        ops.identity_experts.reference(**{"x": x, "weights": weights, "chosen": chosen, "experts": 4, **changes})


def test_experts_refuse_choices_beyond_the_others() -> None:
    x, weights, chosen, *matrices = _drawn(F32)
    with pytest.raises(VerifyError, match="5 experts for each token"):
        ops.experts.reference(x, weights, chosen, *matrices)
    with pytest.raises(VerifyError, match="-1 other experts"):
        ops.experts.reference(x, weights, chosen, *matrices, others=-1)
