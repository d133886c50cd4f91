"""Backends timed on the GPU: a compile chooses by times, what it chose runs, and a second compile times nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot.compile.timing.call_timer
from ingot import compile_model
from ingot.compile.competing import backend_named
from ingot.compile.emitter import Emitter
from ingot.compile.timing.call_clock import time_call
from ingot.compile.timing.tuning_log import read_log
from ingot.debug.verify import verify
from ingot.ir import build
from ingot.ir.artifact.backend_times import Candidate
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.program import Program, Region, Stage
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"target": "cuda", "dtype": "bfloat16", "max_batch": 4, "max_tokens": 128}


def test_a_compile_times_once_and_its_log_reproduces_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of OLMo 2 that stand by themselves are contested in steps of few tokens."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    first = compile_model(checkpoint("olmo2-cut"), tmp_path / "a.ingot", **OPTIONS)
    calls = read_log(first.output, Target.detect("cuda")).calls
    products = [one for one in calls if "ingot.linear" in "".join(one.call)]
    assert products and all(set(one.times) == {"triton", "cublas"} for one in products)
    assert all(0.5 < time.microseconds < 1000 for one in products for some in one.times.values() for time in some)
    assert verify(first.output).holds

    def refuse(*_: Any) -> None:
        raise AssertionError("something is timed again")

    monkeypatch.setattr(ingot.compile.timing.call_timer.CallTimer, "_timed", refuse)
    again = compile_model(checkpoint("olmo2-cut"), tmp_path / "b.ingot", **OPTIONS)
    assert again.build_id == first.build_id
    given = compile_model(checkpoint("olmo2-cut"), tmp_path / "c.ingot", **OPTIONS, tuning_log=first.output)
    assert given.plans.executables.keys() == first.plans.executables.keys()
    decided = json.loads((given.output / "choices.json").read_text())
    assert {one["decided"] for program in decided.values() for one in program["contests"].values()} == {"given"}


def test_the_time_of_a_product_is_that_of_reading_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8192 rows of 8192 numbers, 128 MiB, for 8 tokens: no backend beats the memory, and none takes five times as
    long as it."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    target = Target.detect("cuda")
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, 16)}, bucket=BucketClass(name="few", tokens=(2, 16)))
    x = program.add_input("x", TensorType(torch.bfloat16, ("T", 8192)))
    weight = program.add_input("weight", TensorType(torch.bfloat16, (8192, 8192)))
    body = call_body(program, build.call(program, OPS["linear"].overload, (x, weight), {}), "call")
    with Emitter({"triton": backend_named("triton", "cuda")}, target, 1) as emitter:
        built = emitter.emit([Region("call", body, "triton")])["call"]
        own = Candidate(backend="triton", executable=built, folder=str(emitter.folders[built.id]))
        here = time_call(body, [own, Candidate(backend="cublas")], target)
        there = emitter.time(body, [own, Candidate(backend="cublas")])
    assert target.bandwidth is not None
    least = 8192 * 8192 * 2 / target.bandwidth * 1e6
    for backend in ("triton", "cublas"):
        assert least < here[backend][0].microseconds < 5 * least
        assert there[backend][0]["microseconds"] == pytest.approx(here[backend][0].microseconds, rel=0.2)
