"""The backend against the op's reference, its refusals, and a model compiled with it."""

from pathlib import Path

import pytest
import torch
from my_backend.emit import CGates
from my_backend.load import load

from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.runtime.loading.load_context import on_one_device

TARGET, BUCKET = Target.detect("cpu"), BucketClass(name="any", tokens=(1, 8))
PROGRAM = """\
program gates stage=FUSED
dim T in [1, 8]
input gate: {dtype}[T, 10; 20, 1]
input up: {dtype}[T, 10; 20, 1]
%out = ingot.silu_mul(%gate, %up) : {dtype}[T, 10]
return out=%out
"""


def gates(dtype: str) -> Program:
    return parse_program(PROGRAM.format(dtype=dtype))


@pytest.mark.parametrize(("name", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_code_computes_the_op(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    body = gates(name)
    executable = CGates().emit(body, "key", TARGET, tmp_path)
    run = load(executable, tmp_path, on_one_device("cpu"))
    for tokens in (1, 8):
        merged = torch.randn(tokens, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
        gate, up = merged[:, :10], merged[:, 10:]
        problem = compare(run(gate, up)[0], ops.silu_mul.reference(gate, up), dtype)
        assert problem is None, problem
        assert CGates().workspace(body, executable, tmp_path, {"T": tokens}, 1) == run(gate, up)[0].nbytes


def test_what_is_claimed() -> None:
    (call,) = gates("f32").calls()
    assert isinstance(CGates().claim([call], TARGET, BUCKET), Yes)
    (half,) = gates("f16").calls()
    answer = CGates().claim([half], TARGET, BUCKET)
    assert isinstance(answer, No) and "f16" in answer.reason
    other = PROGRAM.replace("silu_mul(%gate, %up)", 'gelu_mul(%gate, %up, approximate="none")').format(dtype="f32")
    (node,) = parse_program(other).calls()
    assert CGates().claim([node], TARGET, BUCKET) == No("it has silu_mul only")
