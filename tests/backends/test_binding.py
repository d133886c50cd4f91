"""Compiled code checks nothing that it is given: the executor does, when it binds and in the first step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from staged import staged, traced
from tiny import TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import IngotError, InternalError
from ingot.ir.interpret import interpret
from ingot.ir.numerics.harness import load_params, teacher_forced
from ingot.ir.program import Program
from ingot.runtime.cpu.executor import CpuExecutor

NAME = "llama-biased"
SIZES = {"pages": 16, "R": 8}
Executables = dict[str, Callable[..., Sequence[torch.Tensor]]]


@pytest.fixture(scope="module")
def program() -> Program:
    return staged(traced(TINY[NAME].config))[1].programs["any"]


@pytest.fixture
def params(program: Program, checkpoint: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    return load_params(program.params, Checkpoint.open(checkpoint(NAME)).read)


@pytest.fixture
def executables(program: Program) -> Executables:
    """The regions interpreted, in the place of compiled code."""

    def run(name: str) -> Callable[..., Sequence[torch.Tensor]]:
        body = program.regions[name].body
        return lambda *args: list(interpret(body, dict(zip(body.input_types(), args, strict=True))).values())

    return {
        region.executable.id: run(name) for name, region in program.regions.items() if region.executable is not None
    }


def _bind(program: Program, params: Mapping[str, torch.Tensor], executables: Executables) -> CpuExecutor:
    assert program.plan is not None
    return CpuExecutor(program.plan, params, executables, SIZES)


def _run(executor: CpuExecutor, program: Program) -> torch.Tensor:
    return torch.cat(
        teacher_forced(program.input_types(), lambda inputs: executor.launch(inputs).outputs, [[1, 2, 3]], pages=16)
    )


def test_what_fits_is_bound(program: Program, params: dict[str, torch.Tensor], executables: Executables) -> None:
    assert _run(_bind(program, params, executables), program).shape == (3, TINY[NAME].config["vocab_size"])


WEIGHT = "layers.0.attention.o.weight"  # 60 × 60: its transpose has the right shape


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weight: weight.double(), "dtype f64, expected f32"),
        (lambda weight: weight.bfloat16(), "dtype bf16, expected f32"),
        (lambda weight: weight[:-1], r"shape \[59, 60\], expected f32\[60, 60\]"),
        (lambda weight: weight[None], r"shape \[1, 60, 60\], expected f32\[60, 60\]"),
        (lambda weight: weight.flatten(), r"shape \[3600\], expected f32\[60, 60\]"),
        (lambda weight: weight.T, r"strides \[1, 60\], expected row-major"),
        (lambda weight: torch.cat([weight, weight], 1)[:, :60], r"strides \[120, 1\], expected row-major"),
        (lambda weight: weight[:1].expand(60, 60), r"strides \[0, 1\], expected row-major"),
    ],
    ids=["wider", "narrower", "shorter", "deeper", "flat", "transposed", "a part", "expanded"],
)
def test_a_weight_that_does_not_fit_is_refused(
    program: Program,
    params: dict[str, torch.Tensor],
    executables: Executables,
    change: Callable[[torch.Tensor], torch.Tensor],
    problem: str,
) -> None:
    params[WEIGHT] = change(params[WEIGHT])
    with pytest.raises(IngotError, match=f"weight '{WEIGHT}' has {problem}"):
        _bind(program, params, executables)


def test_a_missing_weight_is_named(program: Program, params: dict[str, torch.Tensor], executables: Executables) -> None:
    del params[WEIGHT]
    with pytest.raises(IngotError, match=f"weight '{WEIGHT}' is missing"):
        _bind(program, params, executables)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda result: result.double(), "dtype f64, expected f32"),
        (lambda result: result[..., :-1], "shape "),
        (lambda result: torch.stack([result, result], -1)[..., 0], "strides "),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_code_that_yields_something_else_is_caught_in_the_first_step(
    program: Program,
    params: dict[str, torch.Tensor],
    executables: Executables,
    change: Callable[[torch.Tensor], torch.Tensor],
    problem: str,
) -> None:
    name, right = next(iter(executables.items()))
    executables[name] = lambda *args: [change(result) for result in right(*args)]
    with pytest.raises(InternalError, match=rf"exe\.{name} yields {problem}"):
        _run(_bind(program, params, executables), program)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("tokens", torch.zeros(3, dtype=torch.int64), "dtype i64"),
        ("tokens", torch.zeros(4, dtype=torch.int32), "has shape"),
        ("temperature", torch.zeros(3, 2)[:, 0], "has strides"),
        ("seeds", None, "is missing"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    program: Program,
    params: dict[str, torch.Tensor],
    executables: Executables,
    name: str,
    value: torch.Tensor | None,
    problem: str,
) -> None:
    executor = _bind(program, params, executables)

    def run(inputs: Mapping[str, torch.Tensor]) -> Any:
        changed = {key: tensor for key, tensor in inputs.items() if key != name}
        return executor.launch(changed if value is None else {**inputs, name: value}).outputs

    with pytest.raises(InternalError, match=f"input '(?:{name}|token_seqs)'.*{problem}"):
        teacher_forced(program.input_types(), run, [[1, 2, 3]], pages=16)


def test_a_step_that_no_bucket_class_holds(
    program: Program, params: dict[str, torch.Tensor], executables: Executables
) -> None:
    executor = _bind(program, params, executables)
    with pytest.raises(InternalError, match="no bucket class holds a step of 300 tokens"):
        teacher_forced(
            program.input_types(), lambda inputs: executor.launch(inputs).outputs, [[1] * 150, [2] * 150], pages=32
        )
