"""A small healthy program of each stage, and what the verifier refuses."""

import pytest

from ingot.ir.artifact.plan import Plan, ResidentMemory
from ingot.ir.errors import VerifyError
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify

DIMS = "dim T in [1, 8]\ndim B in [1, 4]\ndim R in [1, 4]\ndim pages in [1, 9]\n"
X = "input x: f32[T, 4]\ninput w: f32[4]\n"
KV = "input k: f32[T, 1, 4]\ninput slots: i64[T]\nstate kv: paged_kv f32[pages, 2, 16, 1, 4] group=full unit=token\n"
WRITE = "%one = ingot.kv_append(%kv, %k, %k, %slots) : state<kv>\n"
ROWS = (
    "input rows: i32[B]\nstate last: row i32[R] group=rows unit=sequence\n"
    "state place: row i32[R] group=rows unit=sequence\n"
    "%moved = ingot.advance(%last, %place, %rows, %rows, %rows, %rows) : (state<last>, state<place>)\n"
    "%last_1 = getitem(%moved, 0) : state<last>\n%place_1 = getitem(%moved, 1) : state<place>\n"
)
REGION = "region r @b {\n  input a: f32[T, 4]\n  %y = aten.mul.Tensor(%a, 2.0) : f32[T, 4]\n  return y=%y\n}\n"


def program(stage: str, body: str, *, dims: str = DIMS) -> Program:
    return parse_program(f"program p stage={stage}\n{dims}{body}")


HEALTHY = {
    "TRACED": X + "%dead = aten.mul.Tensor(%x, 2.0) : f32[T, 4]\nreturn x=%x\n",
    "NORMAL": X + "%y = ingot.rms_norm(%x, %w, eps=1e-05) : f32[T, 4]\nreturn y=%y\n",
    "QUANTIZED": X + "%y = aten.slice.Tensor(%x, 1, 0, 3) : f32[T, 3; 4, 1]\nreturn y=%y\n",
    "SHARDED": X + "param p: f32[4] tp=split(0) = source()\n%y = aten.mul.Tensor(%x, %p) : f32[T, 4]\nreturn y=%y\n",
    "CACHED": KV + WRITE + ROWS + "return kv=%one, last=%last_1, place=%place_1\n",
    "FUSED": X + "%y = ingot.add_rms_norm(%x, %x, %w, eps=1e-05) : (f32[T, 4], f32[T, 4])\n"
    "%z = getitem(%y, 1) : f32[T, 4]\nreturn z=%z\n",
    "LOWERED": X + REGION + "%y = region.r(%x) : f32[T, 4] @b\nreturn y=%y\n",
    "PLANNED": X + "%y = ingot.silu_mul(%x, %x) : f32[T, 4] @reference\nreturn y=%y\n",
}
PLAN = Plan(
    entry="p",
    ending="sample",
    dims={},
    inputs={},
    params={},
    states={},
    outputs={},
    executables={},
    memory=ResidentMemory(weights=0, states=0, inputs=0, outputs=0),
    buckets=(),
)  # what a plan must hold is checked where plans are made


def healthy(stage: Stage) -> Program:
    result = program(stage.name, HEALTHY[stage.name])
    result.plan = PLAN if stage is Stage.PLANNED else None
    return result


def refusal(program: Program, **options: object) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(program, **options)  # type: ignore[arg-type]
    assert caught.value.where.startswith(f"program {program.name}, stage "), "an error says where it is"
    return caught.value
