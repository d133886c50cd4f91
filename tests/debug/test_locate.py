"""Which node is to blame where a pass put calls into regions: the call that was given the wrong value, or its body."""

import pytest
import torch

from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.locate import ObservedProgram, locate
from ingot.debug.bisect.programs.schedule import Request, whole
from ingot.ir.numerics.contracts import Measured
from ingot.ir.parse import parse_program
from ingot.ir.program import Program

_HEAD = """\
program main stage=FUSED
dim T in [1, 64]
input tokens: i32[T]
param embed: f32[9, 4] = source(name="embed")
param first: f32[4] = source(name="first")
param second: f32[4] = source(name="second")
"""
_EMBEDDED = "%embedding = ingot.embedding(%tokens, %embed) : f32[T, 4]\n"
_BEFORE = f"""\
{_HEAD}{_EMBEDDED}\
%rms_norm = ingot.rms_norm(%embedding, %first, eps=1e-06) : f32[T, 4]
%mul = aten.mul.Tensor(%rms_norm, %second) : f32[T, 4]
return logits=%mul
"""
_AFTER = f"""\
{_HEAD}\
region r0 @inductor {{
  input in0: f32[T, 4]
  input in1: f32[4]
  input in2: f32[4]
  %rms_norm = ingot.rms_norm(%in0, %in1, eps=EPS) : f32[T, 4]
  %mul = aten.mul.Tensor(%rms_norm, READ) : f32[T, 4]
  return out0=%mul
}}
{_EMBEDDED}\
%region_r0 = region.r0(%embedding, GIVEN) : f32[T, 4] @inductor
return logits=%region_r0
"""


def _program(eps: str, read: str, given: str) -> Program:
    return parse_program(_AFTER.replace("EPS", eps).replace("READ", read).replace("GIVEN", given))


@pytest.mark.parametrize(
    ("eps", "read", "given", "node"),
    [
        ("0.01", "%in2", "%first, %second", "region_r0/rms_norm"),
        ("1e-06", "%in1", "%first, %second", "region_r0/mul"),
        ("1e-06", "%in2", "%second, %second", "region_r0"),
        ("1e-06", "%in2", "%first, %first", "region_r0"),
    ],
)
def test_a_call_is_to_blame_for_what_it_gives_and_a_body_for_what_it_does(
    eps: str, read: str, given: str, node: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    params = [{name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}]
    steps = whole([Request((1, 4, 7), 3)], (1, 16))

    def by_meaning(old: Measured, new: Measured) -> str | None:
        return differs(new.exact, old.exact)

    def run(program: Program, names: set[str]) -> ObservedProgram:
        return ObservedProgram.run(program, params, steps, 1, names)

    site = locate(parse_program(_BEFORE), _program(eps, read, given), run, by_meaning, {})
    assert site is not None and site.node == node


_SHAPES = {"embed": (9, 4), "first": (4,), "second": (4,)}
