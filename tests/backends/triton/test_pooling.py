"""Attention within a step and the op pool by Triton kernels, against their references, and bit by bit against
themselves in other steps."""

import itertools
from typing import Any

import pytest
import torch
from call_cases import cases
from triton_checks import check_lowering
from triton_schedules import TESTED, run_lowering, some

from ingot.backends.triton.lower.table import LOWERINGS
from ingot.ir.ops import OPS

DIMS = {"step_attention": ("q", "q_starts"), "pool": ("x", "q_starts")}
FEW, MANY = (1, 16), (65, 256)


@pytest.mark.parametrize(("op", "tokens"), some(1, itertools.product(DIMS, [FEW, MANY])))
@pytest.mark.parametrize("dtype", TESTED)
def test_calls(op: str, dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    for number, call in enumerate(cases(op, dtype)):
        if number % 2 and dtype is not torch.float32:
            continue  # the kernels are the same but for what they load
        by_token, by_sequence = DIMS[op]
        named = dict(zip(OPS[op].parameters.names, call.args, strict=False))
        dims = {"T": named[by_token].shape[0], "B": named[by_sequence].shape[0]}
        # Weights of a softmax are rounded once more, as in test_attention.py.
        factor = 4.0 if op == "step_attention" else 1.0
        check_lowering(OPS[op], LOWERINGS[op], call.args, call.kwargs, tokens=tokens, dims=dims, factor=factor)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{"mask": "bidirectional"}, {"mask": "window_21", "soft_cap": 1.5}, {"mask": "block_causal_24"}, {}],
    ids=str,
)
def test_a_sequence_has_the_same_bits_in_every_step(options: dict[str, Any]) -> None:
    """Alone, and after others with tokens of none between, in classes of few and of many tokens."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(70, heads, 16, generator=g).bfloat16() for heads in (4, 2, 2))
    op, lowering = OPS["step_attention"], LOWERINGS["step_attention"]

    def attended(lens: list[int], gap: int, tokens: tuple[int, int]) -> torch.Tensor:
        """The last sequence of a step, which has the first tokens of q, k and v."""
        starts = [sum(lens[:number]) + gap * number for number in range(len(lens))]
        total = starts[-1] + lens[-1] + gap
        rows = [torch.full((total, *one.shape[1:]), float("nan"), dtype=one.dtype) for one in (q, k, v)]
        for one, whole in zip(rows, (q, k, v), strict=True):
            for start, count in zip(starts, lens, strict=True):
                one[start : start + count] = whole[:count]
        ints = [torch.tensor(one, dtype=torch.int32) for one in (starts, lens)]
        dims = {"T": total, "B": len(lens)}
        kwargs = {"scale": 0.25, **options}
        (out,) = run_lowering(op, lowering, [*rows, *ints], kwargs, tokens=tokens, dims=dims, invariant=True)
        return out[starts[-1] : starts[-1] + lens[-1]]

    for count in (1, 40):
        alone = attended([count], 0, FEW)
        assert alone.isfinite().all()
        assert torch.equal(attended([33, 0, 7, count], 1, MANY), alone)
