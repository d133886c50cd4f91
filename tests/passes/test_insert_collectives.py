"""insert-collectives: what was only widened is gathered in front of its cast."""

from collections.abc import Callable

import pytest
import torch
from sharded import CASES
from staged import staged, traced
from tiny import TINY

from ingot.backends.gloo.emit import Gloo
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir import ops
from ingot.ir.artifact.record import PassRecord
from ingot.ir.interpret import interpret_ranks
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, tensor_type
from ingot.passes.insert_collectives import InsertCollectives
from ingot.passes.pipeline import pipeline_for

Apply = Callable[..., tuple[Program, PassRecord]]
TEXT = """program main stage=QUANTIZED
mesh tp=2
dim T in [1, 8]
input x: bf16[T, 4]
param w: bf16[3, 4] tp=shard(0) = shard(source(name="r"), axis="tp", dim=0, segments=[])
%linear = ingot.linear(%x, %w) : bf16[T, 3] tp=shard(1)
%cast = ingot.cast(%linear, dtype=f32) : f32[T, 3] tp=shard(1)
%redistribute = ingot.redistribute(%cast, axis="tp", src="shard", dst="replicated", parts=2, dim=1) : f32[T, 6]
return logits=%redistribute
"""


def test_the_narrow_numbers_are_sent(apply: Apply) -> None:
    after, record = apply(InsertCollectives(), TEXT)
    (gathered,) = after.calls(ops.all_gather.overload)
    assert record.matches == 1 and str(gathered.meta["type"]).startswith("bf16[T, 6]")
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 4, generator=g).bfloat16()
    values = [{"x": x, "w": torch.randn(3, 4, generator=g).bfloat16()} for _ in range(2)]
    old, new = (interpret_ranks(program, values) for program in (parse_program(TEXT), after))
    assert all(torch.equal(one["logits"], other["logits"]) for one, other in zip(old, new, strict=True))
    whole = torch.cat([x @ one["w"].T for one in values], 1).float()
    assert torch.equal(new[0]["logits"], whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("bf16[", "f64[", id="it rounds"),
        pytest.param(
            "return ",
            "%sum = aten.add.Tensor(%cast, 1) : f32[T, 3] tp=shard(1)\n"
            '%all = ingot.all_gather(%sum, axis="tp", dim=1, parts=2) : f32[T, 6]\nreturn all=%all, ',
            id="read",
        ),
    ],
)
def test_a_cast_that_stays_in_front(apply: Apply, old: str, new: str) -> None:
    after, _ = apply(InsertCollectives(), TEXT.replace(old, new))
    gathered = after.output_nodes()["logits"]
    assert gathered.target is ops.all_gather.overload and str(gathered.args[0]) == "cast"
    assert str(gathered.meta["type"]).startswith("f32[T, 6]")


def test_logits_of_a_mesh_stay_narrow() -> None:
    """Behind the gather the cast is a call of its own, and `narrow-logits` takes it away."""
    case = CASES["key-value groups"]
    model = traced({**TINY[case.checkpoint].config, **case.changes, "dtype": "bfloat16"})
    backends = (Reference(), Rowwise(), Gloo())
    program = staged(model, pipeline_for(case.mesh), mesh=case.mesh, backends=backends)[1].programs["any"]
    logits = program.output_nodes()["logits"]
    assert tensor_type(logits).dtype == torch.bfloat16 and logits.target is ops.all_gather.overload
