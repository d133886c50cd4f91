"""Timing tile sizes on a GPU: a compile measures, serves what it measured, and its log reproduces it."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ingot.compiler
from ingot import compile_model
from ingot.debug.verify import verify
from ingot.ir.target import Target
from ingot.ir.tuning import Choice
from ingot.tuner import Tuner
from ingot.tuning_log import read_log

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"target": "cuda", "dtype": "bfloat16", "max_batch": 2, "max_tokens": 2}


def test_a_tuned_artifact_runs_and_is_reproduced(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingot.compiler, "Tuner", partial(Tuner, seconds=0.5))
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    tuned = compile_model(checkpoint("llama-plain"), tmp_path / "a.ingot", **OPTIONS, tune=True)
    log = read_log(tuned.output, Target.detect("cuda"))
    products = [choice for choice in log.choices if choice.kernel == "linear"]
    assert products and all(choice.source == "measured" and choice.microseconds for choice in products)
    assert verify(tuned.output).holds
    again = compile_model(checkpoint("llama-plain"), tmp_path / "b.ingot", **OPTIONS, tuning_log=tuned.output)
    assert again.plans.executables.keys() == tuned.plans.executables.keys()


@pytest.mark.parametrize("tokens", [1, 16])
def test_it_is_no_slower_than_what_is_known_and_within_the_time(tokens: int) -> None:
    from ingot.backends.triton.emit import Triton
    from ingot.backends.triton.lower.linear_choice import known_tiles
    from ingot.backends.triton.lower.linear_problem import LINEAR, LinearProblem

    problem = LinearProblem(6144, 4096, tokens, "bf16", "bf16", norm=True)
    tiles = known_tiles(problem.product(), tokens, 90)[0]
    choice = Choice(kernel=LINEAR, problem=problem.fields(), tiles=vars(tiles), source="table")
    target = Target.detect("cuda")
    first = Triton().measure(choice, target, 0.0)  # what starts up does so here
    begin = time.monotonic()
    found = Triton().measure(choice, target, 3.0)
    assert time.monotonic() - begin < 6.0
    assert first.microseconds and found.microseconds and found.microseconds < 1.05 * first.microseconds
