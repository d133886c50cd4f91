"""Rotary embedding and cache writes by Triton kernels against their references."""

import itertools

import pytest
import torch
from odd_samples import odd_samples
from paged_steps import Heads, paged_step
from triton_checks import check_lowering
from triton_schedules import TESTED, new_schedule, some

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.rope import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table
from ingot.ir.types import TensorType

# A norm that rounds the other way is turned into both elements of a pair, one of which may be small.
FACTOR = {torch.float32: 1.0, torch.bfloat16: 8.0, torch.float16: 8.0}
dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)
SIZES = [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64)]  # of a head, and of its part that is turned
TABLES = {
    rotary: make_table({"kind": "rope", "rope_type": "default", "positions": 512, "theta": 1e4, "rotary_dim": rotary})
    for rotary in (256, 128, 96, 80, 64, 32)
}


@dtypes
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        tokens = sample.args[0 if name == "rope" else 1].shape[0]
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs, dims={"T": tokens}, factor=FACTOR[dtype])


@dtypes
@pytest.mark.parametrize(
    ("normed", "sizes", "interleaved"), some(9, itertools.product((None, "same", "wide"), SIZES, (False, True)))
)
def test_sizes(normed: str | None, sizes: tuple[int, int], interleaved: bool, dtype: torch.dtype) -> None:
    dim, rotary = sizes
    g = torch.Generator().manual_seed(dim)
    step = paged_step(g, dtype, Heads(37 if dim == 64 else 6, 3, dim), [(1, 20), (3, 7), (1, 0)], gap=1)
    kind = torch.float32 if normed == "wide" else dtype
    weights = [torch.randn(dim, generator=g).to(kind) for _ in range(2)] if normed else []
    kv = step.kv.nan_to_num(7.0)
    args = (kv, step.q, step.k, step.v, step.positions, TABLES[rotary], step.slots, *weights)
    options = {"eps": 1e-5, "interleaved": interleaved}
    name, dims = "qk_norm_rope_append", {"T": len(step.q)}
    check_lowering(OPS[name], LOWERINGS[name], args, options, dims=dims, factor=FACTOR[dtype])
    if normed is None:
        turned = (step.q, step.positions, TABLES[rotary])
        check_lowering(OPS["rope"], LOWERINGS["rope"], turned, {"interleaved": interleaved}, dims=dims)
        written = (kv, step.k, step.v, step.slots)
        check_lowering(OPS["kv_append"], LOWERINGS["kv_append"], written, {}, dims=dims)


def test_refusals() -> None:
    def call(x: TensorType, table: TensorType) -> Call:
        values = {"x": Value(x, 0), "positions": Value(TensorType(torch.int32, ("T",)), 1), "table": Value(table, 2)}
        return Call("rope", values, {"interleaved": False}, (TensorType(x.dtype, x.shape),))

    table = TensorType(torch.float32, (64, 32))
    for reason, one in {
        "heads of 512 elements, more than 256": call(TensorType(torch.float32, ("T", 2, 512)), table),
        "x is strided along its last axis": call(TensorType(torch.float32, ("T", 2, 64), (256, 128, 2)), table),
        "a table of bf16": call(TensorType(torch.float32, ("T", 2, 64)), TensorType(torch.bfloat16, (64, 32))),
    }.items():
        with pytest.raises(Refused, match=reason):
            LOWERINGS["rope"](one, new_schedule())
