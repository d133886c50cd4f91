"""Experts that return their input, against transformers' LongCat-Flash."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_program import PARTIAL, shard
from op_values import F32, FLOATS, check, generator, randn
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from ingot.ir import ops
from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS
from ingot.ir.placements import Call
from ingot.ir.types import TensorType

TOKENS, EXPERTS, OTHERS, TOP_K, HIDDEN, WIDTH = 9, 4, 3, 5, 24, 20
_SHAPES = {"x": ("T", HIDDEN), "gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}


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
@pytest.mark.parametrize("part", ["reference", "rowwise"])
def test_experts_are_transformers(part: str, dtype: torch.dtype) -> None:
    x, weights, chosen, *matrices = _drawn(dtype)
    found = getattr(ops.experts, part)(x, weights, chosen, *matrices, identities=OTHERS)
    check(found, _by_transformers(x, weights, chosen, *matrices).to(dtype), dtype, HIDDEN + WIDTH)


@pytest.mark.parametrize("weigh_input", [False, True])
def test_alone_they_scale_the_input(weigh_input: bool) -> None:
    x, weights, chosen, *matrices = _drawn(F32)
    alone = torch.full_like(chosen, EXPERTS)
    found = ops.experts.reference(x, weights, alone, *matrices, identities=OTHERS, weigh_input=weigh_input)
    assert torch.allclose(found, x * weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_ranks_add_parts(parts: int, weigh_input: bool) -> None:
    """Each rank has a part of the width of each expert, not all the same. What they compute adds up."""
    x, weights, chosen, gate_up, down = (one.double() if one.is_floating_point() else one for one in _drawn(F32))
    options = {"identities": OTHERS, "weigh_input": weigh_input}
    width = -(-WIDTH // parts)
    total = torch.zeros_like(x)
    for rank in range(parts):
        mine = slice(rank * width, (rank + 1) * width)
        both = torch.cat([one[:, mine] for one in gate_up.chunk(2, 1)], 1)
        total += ops.experts.reference(
            x, weights, chosen, both, down[:, :, mine].contiguous(), **options, identity_parts=parts
        )
    whole = ops.experts.reference(x, weights, chosen, gate_up, down, **options)
    check(total, whole, torch.float64, HIDDEN + WIDTH)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "5 experts for each token"),
        ({"identities": -1}, "identities is -1"),
        ({"identities": OTHERS, "identity_parts": 0}, "identity_parts is 0"),
    ],
)
def test_refuses(options: dict[str, Any], what: str) -> None:
    x, weights, chosen, *matrices = _drawn(F32)
    with pytest.raises(VerifyError, match=what):
        ops.experts.reference(x, weights, chosen, *matrices, **options)


@pytest.mark.parametrize(("parts", "fits"), [(1, False), (2, True), (3, False)])
def test_a_mesh_wants_as_many_parts_as_ranks(parts: int, fits: bool) -> None:
    """The rule of placement, where two ranks split the experts' width."""
    types = {name: TensorType(F32, shape) for name, shape in _SHAPES.items()}
    at = {"gate_up": shard(1, WIDTH, WIDTH), "down": shard(2)}
    values = dict.fromkeys(types) | {"gate_up_format": "plain", "down_format": "plain"}
    call = Call({**values, "identities": OTHERS, "identity_parts": parts}, at, types, types["x"], "tp", 2)
    if fits:
        assert OPS["experts"].placement(call).result == PARTIAL
        return
    with pytest.raises(VerifyError, match=f"2 ranks add the input, and identity_parts is {parts}"):
        OPS["experts"].placement(call)
