"""expand-latents: keys and values of each head for a step's own tokens, and latents for those before it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LIMIT_OPTIONS
from staged import LIMITS, pass_context, staged, traced
from tiny import TINY

from ingot.backends.gloo.emit import Gloo
from ingot.backends.reference.emit import Reference
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import breach, measure
from ingot.ir.numerics.harness import rank_params
from ingot.ir.program import Model, Program, Stage
from ingot.passes.expand_latents import ExpandLatents
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.manager import run_pass, run_pipeline
from ingot.passes.pipeline import PIPELINE, pipeline_for
from ingot.passes.rewrite import Rewriter

pytestmark = pytest.mark.one_in_file(3)

NAME = "deepseek_v3-groups"
REQUESTS = [[1, 5, 9, 2, 8, 300, 41], [7], [3, 3, 17, 250, 11, 12, 13, 14, 15, 16, 18, 19, 20]]
GPU = Target.named("sm_90")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Model, Any]]:
    """A checkpoint whose layers have no experts: another choice of experts would be a large difference."""
    folder = TINY[NAME].write(tmp_path_factory.mktemp("expand") / "m", first_k_dense_replace=3)

    def read(dtype: str) -> tuple[Model, Any]:
        return Request.read(folder, **LIMIT_OPTIONS, dtype=dtype).trace(), Checkpoint.open(folder).read

    return read


def _before(model: Model) -> Program:
    steps, _ = staged(model)
    return next(step.program for step in steps if step.name == "choose-layouts")


def _expanded(program: Program) -> Program:
    after, record = run_pass(ExpandLatents(force=True), program.copy(), pass_context(), under=Stage.FUSED)
    assert record.matches == 3 and record.numerics is Numerics.ROUNDING and not record.refusals
    return after


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 4, 1])
def test_it_keeps_its_contract(dtype: str, chunk: int | None, opened: Callable[[str], tuple[Model, Any]]) -> None:
    """For whole prompts, for parts of them over cached latents, and for single tokens."""
    model, read = opened(dtype)
    before = _before(model)
    after = _expanded(before)
    assert len([*after.calls(ops.step_latent_attention.overload)]) == 3
    assert not [*after.calls(ops.paged_attention.overload)]
    measured = [measure(one, rank_params(one, read), REQUESTS, chunk=chunk, seed=3).logits for one in (before, after)]
    problem = breach(Numerics.ROUNDING, *measured, getattr(torch, dtype))
    assert problem is None, problem.text
    wrong = after.copy()
    for call in wrong.calls(ops.step_latent_attention.overload):
        call.kwargs = {**call.kwargs, "scale": call.kwargs["scale"] * 1.1}
    changed = measure(wrong, rank_params(wrong, read), REQUESTS, chunk=chunk, seed=3).logits
    assert breach(Numerics.ROUNDING, measured[0], changed, getattr(torch, dtype)) is not None


KERNELS, REFERENCE = (Triton(), Reference()), (Reference(),)


def test_a_gpu_expands_in_steps_of_prompts() -> None:
    """Not in steps of few tokens, in deterministic mode, without a kernel, or over a cache of eight bits."""
    model = traced({**TINY[NAME].config, "dtype": "bfloat16", "first_k_dense_replace": 3})

    def lowered(*, deterministic: bool = False, backends: Any = KERNELS, kv: str = "auto") -> Any:
        classes = bucket_classes(GPU, backends, LIMITS.max_tokens, LIMITS.max_batch, deterministic=deterministic)
        context = pass_context(target=GPU, backends=backends, deterministic=deterministic, bucket=None)
        changed = InsertPagedKV(kv_cache_dtype=kv)
        pipeline = tuple(
            replace(phase, passes=tuple(changed if one.name == changed.name else one for one in phase.passes))
            for phase in PIPELINE
        )
        return run_pipeline(model, context, classes, pipeline, upto=Stage.LOWERED)

    def expanded(found: Any) -> set[str]:
        return {
            name for name, program in found.programs.items() if [*program.calls(ops.step_latent_attention.overload)]
        }

    def reasons(found: Any) -> set[str]:
        records = [record for record in found.records if record.name == ExpandLatents.name]
        return {refusal.reason for record in records for refusal in record.refusals}

    assert expanded(lowered()) == {"extend"}
    assert not expanded(lowered(deterministic=True))
    assert not expanded(lowered(backends=REFERENCE))
    narrow = lowered(kv="fp8")
    assert not expanded(narrow)
    assert reasons(narrow) == {"the cache rounds latents, and the step's own latents are rounded too"}


def test_fuel(opened: Callable[[str], tuple[Model, Any]]) -> None:
    program = _before(opened("float32")[0]).copy()
    calls = [node.name for node in program.calls()]
    rewriter = Rewriter(program, fuel=0)
    ExpandLatents(force=True).run(rewriter, pass_context())
    assert not rewriter.rewrites() and [node.name for node in program.calls()] == calls


def test_on_a_mesh(tmp_path: Path) -> None:
    """Heads are split, and each rank has all latents and their cache."""
    folder = TINY[NAME].write(tmp_path / "m", first_k_dense_replace=3, intermediate_size=104, vocab_size=380)
    model, mesh = Request.read(folder, **LIMIT_OPTIONS, dtype="float32").trace(), {"tp": 2}
    steps, _ = staged(model, pipeline_for(mesh), mesh=mesh, backends=(Reference(), Gloo()))
    before = next(step.program for step in steps if step.name == "choose-layouts")
    after, record = run_pass(ExpandLatents(force=True), before.copy(), pass_context(mesh=mesh), under=Stage.FUSED)
    assert record.matches == 3
    read = Checkpoint.open(folder).read
    measured = [measure(one, rank_params(one, read), REQUESTS, chunk=4, seed=3).logits for one in (before, after)]
    problem = breach(Numerics.ROUNDING, *measured, torch.float32)
    assert problem is None, problem.text
