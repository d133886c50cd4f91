"""Weights that are multiplied with pairs of 8-bit values: how much their rounding to f16 moves a result."""

import math

import pytest
import torch
import triton
import triton.language as tl
from triton_schedules import DEVICE

from ingot.backends.triton.kernels.attention.constants import Scores
from ingot.backends.triton.kernels.attention.pairs import joined, weighed_pairs
from ingot.backends.triton.kernels.attention.softmax import LOWEST, Operands

ROWS, KEYS, WIDTH = 16, 256, 64


@triton.jit
def _attend(
    out, scores, kv, value_scales, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCORES: tl.constexpr
):  # fmt: skip
    """Write the sum of N values, weighted by the softmax of M rows of scores, from values and scales per token."""
    m, n, w, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D // 2), tl.arange(0, D)
    words = tl.load(kv.to(tl.pointer_type(tl.int16), bitcast=True) + n[:, None] * (D // 2) + w[None, :])
    half = tl.zeros((M, D // 2), tl.float32)
    first, second, _, _ = weighed_pairs(
        tl.load(scores + m[:, None] * N + n[None, :]), words, half, half, tl.zeros((M,), tl.float32),
        tl.full((M,), LOWEST, tl.float32), (n < N)[None, :], kv, Operands(value_scales=tl.load(value_scales + n)),
        SCORES, False,
    )  # fmt: skip
    tl.store(out + m[:, None] * D + d[None, :], joined(first, second))


@pytest.mark.parametrize("deviation", [1.0, 2.0, 4.0])
def test_the_ratio_of_scales_at_which_weights_in_bf16_would_err_less(deviation: float) -> None:
    """One key has a larger scale than the others and a weight near zero. It sets what the others are divided by."""
    g = torch.Generator().manual_seed(7)
    scores = torch.randn(ROWS, KEYS, generator=g) * deviation
    scores[:, 0] = -100.0
    values = torch.randint(-127, 128, (KEYS, WIDTH), generator=g, dtype=torch.int8)
    scales = torch.rand(KEYS, generator=g) * 0.5 + 0.5
    weights = torch.exp2(scores - scores.amax(1, keepdim=True))

    def relative_errors(ratio: float) -> tuple[float, float]:
        """The errors of the kernel and of weights in bf16, relative to the size of results (root mean square)."""
        scales[0] = ratio
        out = torch.empty(ROWS, WIDTH, device=DEVICE)
        given = (one.to(DEVICE) for one in (scores, values, scales))
        _attend[(1,)](out, *given, ROWS, KEYS, WIDTH, Scores(math.log(2.0), "causal", None))
        exact = (weights.double() * scales.double()) @ values.double()
        wide = (weights * scales).bfloat16().double() @ values.double()
        found, other = ((one - exact).square().mean().sqrt().item() for one in (out.cpu().double(), wide))
        return found / exact.square().mean().sqrt().item(), other / exact.square().mean().sqrt().item()

    for ratio, least, most in ((1.0, 0.0, 0.25), (2.0**10, 0.0, 0.3), (2.0**12, 0.0, 1.0), (2.0**15, 1.0, 8.0)):
        found, wide = relative_errors(ratio)
        assert least < found / wide < most, f"at a ratio of {ratio}, errors are {found:.1e} and {wide:.1e}"
