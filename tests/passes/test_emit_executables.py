"""emit-executables: regions without an executable go to the driver, once each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from staged import emit_nothing, pass_context

from ingot.ir.artifact.plan import Executable
from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import BackendError
from ingot.ir.parse import parse_program
from ingot.ir.program import Region, Stage
from ingot.passes.emit_executables import EmitExecutables
from ingot.passes.manager import run_pass

TEXT = (Path(__file__).parent / "goldens" / "emit-executables.before.ir").read_text(encoding="utf-8")


def test_golden(golden: Callable[..., PassRecord]) -> None:
    """The text does not change: executables are no part of it."""
    assert golden(EmitExecutables()).matches == 1


def test_only_what_is_missing_is_emitted() -> None:
    asked: list[str] = []

    def emit(regions: Sequence[Region]) -> Mapping[str, Executable]:
        asked.extend(region.name for region in regions)
        return emit_nothing(regions)

    program = parse_program(TEXT)
    once, record = run_pass(EmitExecutables(), program, pass_context(emit=emit), under=Stage.LOWERED)
    assert asked == ["r0"] and record.matches == 1
    executable = once.regions["r0"].executable
    assert executable is not None and executable.inputs == ("f32[T, 8]", "f32[8]")
    assert program.regions["r0"].executable is None, "a pass works on a copy"
    again, record = run_pass(EmitExecutables(), once, pass_context(emit=emit), under=Stage.LOWERED)
    assert asked == ["r0"] and record.matches == 0 and again.regions["r0"].executable == executable


def test_without_regions_nothing_is_needed() -> None:
    text = "program main stage=FUSED\ndim T in [1, 8]\ninput x: f32[T, 8]\n"
    text += "%mul = aten.mul.Tensor(%x, %x) : f32[T, 8] @reference\nreturn y=%mul\n"
    _, record = run_pass(EmitExecutables(), parse_program(text), pass_context(emit=None), under=Stage.LOWERED)
    assert record.matches == 0


def test_a_compiler_that_fails_is_named() -> None:
    def emit(regions: Sequence[Region]) -> Mapping[str, Executable]:
        raise BackendError(f"cannot compile {regions[0].name}")

    with pytest.raises(BackendError, match="pass emit-executables: cannot compile r0"):
        run_pass(EmitExecutables(), parse_program(TEXT), replace(pass_context(), emit=emit), under=Stage.LOWERED)
