"""absorb-latents: attention over latents in place of keys and values of each head."""

from collections.abc import Callable

import pytest
import torch
from staged import pass_context

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import VerifyError
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes.absorb_latents import AbsorbLatents
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.manager import run_pass
from ingot.passes.rewrite import Rewriter

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    """Also with a mask and with the scales of a cache of eight bits."""
    record = golden(AbsorbLatents())
    assert record.matches == 2 and record.numerics is Numerics.ROUNDING
    assert record.op_count_diff["ingot.attention"] == 2 and record.op_count_diff["ingot.head_linear"] == 4


ONE = """program main stage=SHARDED
dim T in [1, 8]
input q: f64[T, 4, 10]
input q_rotated: f64[T, 4, 6]
input latents: f64[T, 1, 14]
input k_rotated: f64[T, 1, 6]
input k_up: f64[4, 10, 14]
input v_up: f64[4, 9, 14]
input positions: i32[T]
input token_seqs: i32[T]
%latent_attention = ingot.latent_attention(%q, %q_rotated, %latents, %k_rotated, %k_up, %v_up, %positions, \
%token_seqs, scale=0.3, layer=2) : f64[T, 4, 9]
return x=%latent_attention
"""


def _inputs(program: Program) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    rows = {
        "positions": torch.tensor([0, 1, 2, 3, 0, 1], dtype=torch.int32),
        "token_seqs": torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32),
    }
    shapes = {name: one.bind({"T": 6}) for name, one in program.input_types().items() if name not in rows}
    return {**{name: torch.randn(shape, generator=g).double() for name, shape in shapes.items()}, **rows}


def test_it_computes_the_same(apply: Apply) -> None:
    before = parse_program(ONE)
    after, _ = apply(AbsorbLatents(), ONE)
    given = _inputs(before)
    expected, found = (interpret(program, given)["x"] for program in (before, after))
    assert compare(found, expected, torch.float64, factor=10) is None  # sums in another order, three times
    (mixed,) = after.calls(ops.attention.overload)
    wrong = after.copy()
    (attention,) = wrong.calls(ops.attention.overload)
    attention.kwargs = {**attention.kwargs, "scale": mixed.kwargs["scale"] * 1.1}
    assert compare(interpret(wrong, given)["x"], expected, torch.float64, factor=10) is not None


def test_a_cache_of_it_holds_latents(apply: Apply) -> None:
    """14 numbers of the latent and 6 of the rotated key per token, instead of 4 heads with 16 and 9 numbers."""
    absorbed, _ = apply(AbsorbLatents(), ONE)
    program, record = run_pass(InsertPagedKV(), absorbed, pass_context(), under=Stage.CACHED)
    assert record.matches == 1
    assert str(program.states["kv.2"].type) == "f64[pages, 1, 16, 1, 20]"
    (attention,) = program.calls(ops.paged_attention.overload)
    assert attention.kwargs["value_width"] == 14 and str(attention.meta["type"]) == "f64[T, 4, 14]"


def test_without_it_no_cache_is_made() -> None:
    """insert-paged-kv leaves the call as it is, and the verifier names it."""
    program, record = run_pass(InsertPagedKV(), parse_program(ONE), pass_context(), under=Stage.CACHED)
    assert record.matches == 0
    program.stage = Stage.CACHED
    with pytest.raises(VerifyError, match=r"op ingot\.latent_attention is not legal here"):
        verify(program)


def test_fuel() -> None:
    program = parse_program(ONE)
    rewriter = Rewriter(program, fuel=0)
    AbsorbLatents().run(rewriter, pass_context())
    assert not rewriter.rewrites() and len([*program.calls(ops.latent_attention.overload)]) == 1
