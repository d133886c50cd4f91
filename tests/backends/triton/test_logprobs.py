"""top_logprobs by Triton kernels against its reference."""

import pytest
import torch
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import TESTED

from ingot.backends.triton.lower.sampling.logprobs import LOWERINGS
from ingot.ir.ops import OPS

_OP = OPS["top_logprobs"]


def _check(*args: torch.Tensor) -> None:
    check_lowering(_OP, LOWERINGS["top_logprobs"], args, {}, dims={"L": args[0].shape[0]})


@pytest.mark.parametrize("dtype", TESTED)
def test_samples(dtype: torch.dtype) -> None:
    for sample in _OP.samples(torch.Generator().manual_seed(1), dtype) + odd_samples("top_logprobs", dtype):
        _check(*sample.args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 30, 9001])
def test_random_rows(vocab: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=g) * 3
    logits[1] = logits[1].round()  # equals
    logits[3] = 2.0  # and nothing else
    logits[4] = logits[4].sort().values
    logits[2, 1::2] = float("-inf")
    draw = [torch.randint(0, vocab, (6,), generator=g, dtype=torch.int32) for _ in range(2)]
    sampled, targets = draw
    targets[::2], sampled[3] = -1, -1
    _check(logits.to(dtype), sampled, targets, torch.tensor([0, 20, 5, 20, 7, -1], dtype=torch.int32))
