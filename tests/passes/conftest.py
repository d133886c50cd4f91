"""One pass at a time on small programs in text form, compared with golden texts."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from staged import pass_context

from ingot.ir.artifact.record import PassRecord
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.base import Pass
from ingot.passes.manager import run_pass
from ingot.passes.pipeline import ON_REQUEST, PIPELINE, SHARDING

# A pass that stands in several phases is tested on its way to the first.
STAGES: Mapping[str, Stage] = {
    **{name: made.joins for name, made in ON_REQUEST.items()},
    **{one.name: phase.stage for phase in (SHARDING, *reversed(PIPELINE)) for one in phase.passes},
}
GOLDENS = Path(__file__).parent / "goldens"
Apply = Callable[..., tuple[Program, PassRecord]]


@pytest.fixture(scope="session")
def apply() -> Apply:
    """`apply(pass, text, **context)`: what the pass makes of the program in `text`, which is verified before."""

    def run(one: Pass, text: str, **changes: object) -> tuple[Program, PassRecord]:
        program = parse_program(text)
        # A program with backends is on its way to LOWERED, and one on a mesh to SHARDED, whatever it has reached.
        on_the_way = Stage.LOWERED if " @" in text else Stage.SHARDED if program.mesh else None
        verify(program, under=None if on_the_way is None else max(on_the_way, program.stage))
        changes = {"bucket": program.bucket, **changes} if program.bucket else changes
        return run_pass(one, program, pass_context(**changes), under=STAGES[one.name])  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="session")
def golden(apply: Apply) -> Callable[..., PassRecord]:
    """`golden(pass)`: that the pass makes goldens/NAME.after.ir of goldens/NAME.before.ir.

    UPDATE_GOLDENS=1 in the environment writes the texts after, to be read before they are committed.
    """

    def check(one: Pass, **changes: object) -> PassRecord:
        before = (GOLDENS / f"{one.name}.before.ir").read_text(encoding="utf-8")
        program, record = apply(one, before, **changes)
        assert record.ir_before == before == print_program(parse_program(before))
        after = GOLDENS / f"{one.name}.after.ir"
        if os.environ.get("UPDATE_GOLDENS"):
            after.write_text(record.ir_after, encoding="utf-8")
        assert record.ir_after == after.read_text(encoding="utf-8")
        assert record.ir_after == print_program(program)
        return record

    return check
