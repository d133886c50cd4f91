"""Which node is to blame where a pass put calls into regions: the call that was given the wrong value, or its body."""

import pytest
import torch

from ingot.debug.bisect.programs.compare import differs
from ingot.debug.bisect.programs.locate import ObservedProgram, locate
from ingot.debug.bisect.programs.schedule import Request, in_chunks, whole
from ingot.ir.numerics.contracts import Measured
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.verify import verify

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

_ON_MESH = """\
program main stage=FUSED
mesh tp=2
dim T in [1, 64]
input tokens: i32[T]
param table: f32[5, 4] tp=shard(0) = shard(source(name="table"), axis="tp", dim=0, segments=[])
param gain: f32[4] = source(name="gain")
%part = ingot.vocab_embedding(%tokens, %table, axis="tp", parts=2) : f32[T, 4] tp=partial
%sum = ingot.all_reduce(%part, axis="tp") : f32[T, 4]
%normed = ingot.rms_norm(%sum, %gain, eps=1e-06) : f32[T, 4]
%mul = aten.mul.Tensor(%normed, 2.0) : f32[T, 4]
return logits=%mul
"""
_SPLIT = (
    _ON_MESH.replace("dim T in [1, 64]", "dim T in [1, 64]\ndim T_tp in [1, 32]")
    .replace(
        '%sum = ingot.all_reduce(%part, axis="tp") : f32[T, 4]',
        '%rows = ingot.reduce_scatter(%part, axis="tp", dim=0, parts=2) : f32[T_tp, 4] tp=shard(0)',
    )
    .replace("(%sum, %gain, eps=1e-06) : f32[T, 4]", "(%rows, %gain, eps=1e-06) : f32[T_tp, 4] tp=shard(0)")
    .replace("%mul =", '%whole = ingot.all_gather(%normed, %tokens, axis="tp", dim=0, parts=2) : f32[T, 4]\n%mul =')
    .replace("(%normed, 2.0)", "(%whole, 2.0)")
)


def test_rows_of_all_ranks_are_compared() -> None:
    """In steps of three and of two tokens, a rank has two rows and one, and the last one pads them."""
    generator = torch.Generator().manual_seed(6)
    table, gain = torch.randn(10, 4, generator=generator), torch.randn(4, generator=generator)
    params = [{"table": table[at : at + 5].clone(), "gain": gain} for at in (0, 5)]
    steps = in_chunks([Request((1, 9, 4, 7, 2), 5)], (1, 16), by_device=False, chunk=3)
    assert len(steps) == 2
    found = []
    for text in (_ON_MESH, _SPLIT):
        program = parse_program(text)
        verify(program)
        observed = ObservedProgram.run(program, params, steps, 1, {"normed", "mul"})
        found.append([observed.value(node) for node in program.calls() if node.name in ("normed", "mul")])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.found.shape == (5, 4)
        assert torch.equal(one.found, other.found) and torch.equal(one.exact, other.exact)
