"""Latent attention of the tokens of a step by Triton kernels, and the part over cached positions before it."""

import pytest
import torch
from call_cases import cases
from triton_checks import check_lowering
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

NAME = "step_latent_attention"
MANY = (65, 8192)


@pytest.mark.parametrize("dtype", TESTED)
def test_calls(dtype: torch.dtype) -> None:
    for call in cases(NAME, dtype):
        dims = {"T": call.args[0].shape[0], "B": call.args[5].shape[0]}
        # Weights of a softmax are rounded once more, as in test_attention.py.
        check_lowering(OPS[NAME], LOWERINGS[NAME], call.args, call.kwargs, tokens=MANY, dims=dims, factor=4.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokens", [(1, 64), MANY], ids=["few", "many"])
def test_the_part_before_a_step(tokens: tuple[int, int]) -> None:
    """Over cached positions without the tokens of the step: those of a shorter sequence."""
    op, lowering = OPS["partial_attention"], LOWERINGS["partial_attention"]
    calls = [call for call in cases("partial_attention", TESTED[0]) if call.kwargs.get("cached")]
    for call in calls if DEVICE == "cuda" else calls[:2]:
        q, kv, table, starts, lens, kv_lens = call.args
        dims = {"T": q.shape[0], "B": len(lens)}
        found = run_lowering(op, lowering, call.args, call.kwargs, tokens=tokens, dims=dims)
        options = {name: value for name, value in call.kwargs.items() if name != "cached"}
        expected = op.reference(q, kv, table, starts, lens, kv_lens - lens, **options)
        fed = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, lens, strict=True)])
        for one, other in zip(found, expected, strict=True):
            problem = compare(one.cpu()[fed], other[fed], other.dtype, factor=4.0)
            assert problem is None, problem


def test_refuses() -> None:
    def call(width: int, dtype: torch.dtype = torch.bfloat16) -> Call:
        heads = TensorType(dtype, ("T", 2, width))
        one, ints = TensorType(dtype, ("T", 1, 8)), TensorType(torch.int32, ("B",))
        rotated, lse = TensorType(dtype, ("T", 2, 8)), TensorType(torch.float32, ("T", 2))
        types = {"q": heads, "q_rotated": rotated, "k": heads, "k_rotated": one, "v": heads}
        types |= {"q_starts": ints, "q_lens": ints, "before": heads, "before_lse": lse}
        values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
        return Call(NAME, values, {"scale": 1.0}, (heads,))

    with pytest.raises(Refused, match="tiles of 512 elements"):
        LOWERINGS[NAME](call(300), new_schedule(MANY))
    with pytest.raises(Refused, match="summed apart from the cached ones"):
        LOWERINGS[NAME](call(64), new_schedule(MANY, invariant=True))
    for width, stages in ((128, 3), (256, 3)):
        schedule = new_schedule(MANY)
        LOWERINGS[NAME](call(width), schedule)
        assert schedule.launches[0].stages == stages
