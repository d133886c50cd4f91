"""The ops of LoRA adapters against one matmul per token in float64."""

import pytest
import torch
from op_values import check, generator, ints, randn

from ingot.ir.errors import VerifyError
from ingot.ir.ops import lora_expand, lora_shrink

SLOTS = (2, -1, 0, 0, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_token_uses_the_factors_of_its_adapter(dtype: torch.dtype) -> None:
    g = generator()
    x, y = randn(g, dtype, 6, 40), randn(g, dtype, 6, 30)
    a, b = randn(g, dtype, 3, 8, 40), randn(g, dtype, 3, 30, 4)
    shrunk = lora_shrink(x, ints(*SLOTS), a)
    found = lora_expand(y, shrunk, ints(*SLOTS), b, segments=[10, 20])
    assert shrunk.dtype is torch.float32 and found.dtype is dtype
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            assert not shrunk[token].any() and torch.equal(found[token], y[token])
            continue
        down = a[slot].double() @ x[token].double()
        up = torch.cat([b[slot, :10].double() @ down[:4], b[slot, 10:].double() @ down[4:]])
        check(shrunk[token].to(dtype), down, dtype)
        check(found[token], y[token].double() + up, dtype)


def test_factors_of_other_shapes_are_refused() -> None:
    g = generator()
    x, y, slots = randn(g, torch.float32, 2, 40), randn(g, torch.float32, 2, 30), ints(0, 0)
    with pytest.raises(VerifyError, match="factors"):
        torch.ops.ingot.lora_shrink(x.to("meta"), slots.to("meta"), torch.empty(3, 8, 41, device="meta"))
    shrunk = torch.empty(2, 8, device="meta")
    with pytest.raises(VerifyError, match="segments"):
        torch.ops.ingot.lora_expand(
            y.to("meta"), shrunk, slots.to("meta"), torch.empty(3, 30, 4, device="meta"), segments=[10, 10]
        )
