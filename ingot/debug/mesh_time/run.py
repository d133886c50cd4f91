"""Run a step on all ranks of a mesh, as serving does, and collect what each of them records."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ingot.debug.explained import StepShape
from ingot.debug.requested_step import limits_of
from ingot.debug.step_time.inputs import step_inputs
from ingot.ir.errors import IngotError, RankError
from ingot.ir.mesh import STAGES, Rank, ranks
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.ranks.launcher import MeshLauncher
from ingot.runtime.ranks.measuring.rank_measurement import spans_file, trace_file
from ingot.runtime.ranks.measuring.recorder import CallSpan, read_spans
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule
from ingot.runtime.ranks.seat import rank_text
from ingot.runtime.ranks.step_slots import mesh_layout
from ingot.runtime.steps.step_outputs import VECTORS

# Steps that are not measured: libraries prepare, every pipeline stage checks the types of its first steps, and on a GPU
# graphs are captured.
_WARM = 8
_PLAIN = 11  # steps as in serving; their median counts
_RECORDED = 24  # recorded steps; the faster half of them counts
_TRACED = 3


@dataclass(frozen=True)
class MeshRun:
    """The measurements of all ranks of a mesh.

    seconds   the time of each step as it is served
    spans     the spans of each recorded step, by the index of the rank
    traces    the profiler's trace of each rank as JSON text; empty without a profiler
    """

    seconds: Sequence[float]
    spans: Mapping[int, Sequence[Sequence[CallSpan]]]
    traces: Mapping[int, bytes]


def run_mesh(folder: Path, step: StepShape, *, trace: bool) -> MeshRun:
    """Start all ranks of an artifact, and run a step of the entry `main` on them many times, one after another.

    With `trace`, a profiler records some further steps. All ranks have ended when this returns or raises an error.
    Raises IngotError if the artifact does not run on this machine, and RankError if a rank ends or fails.
    """
    page_size = limits_of(open_artifact(folder)).page_size
    schedule = MeasuringSchedule(plain=_WARM + _PLAIN, recorded=_RECORDED, traced=_TRACED if trace else 0)
    loaded = load_artifact(folder, num_pages=step.pages(page_size), all_ranks=True, measuring=schedule)
    assert loaded.leader is not None  # the artifact is for a mesh
    try:
        with _named(loaded.context.rank):
            return _run(loaded, step, schedule)
    finally:
        loaded.leader.close()


@contextmanager
def _named(own: Rank) -> Iterator[None]:
    """Name in each error the rank that fails. An error of another rank has its name; others are those of `own`."""
    try:
        yield
    except IngotError as error:
        failed = error.what if isinstance(error, RankError) else f"{rank_text(own)} failed: {error.what}"
        raise RankError(
            f"{failed}, while a step was measured",
            where=error.where,
            expected=error.expected or "ranks that run until the last step",
            hint="measure the step again; `ingot bench latency` shows whether the mesh serves",
        ) from error


def _run(loaded: Loaded, step: StepShape, schedule: MeasuringSchedule) -> MeshRun:
    leader, mesh, limits = loaded.leader, loaded.context.mesh, loaded.limits
    assert leader is not None and leader.measurement is not None
    own = leader.measurement.launcher(loaded.executor, loaded.context)
    launcher = MeshLauncher(own, leader, mesh.get(STAGES, 1))
    layout = mesh_layout(read_plan_file(loaded.artifact))
    inputs = step_inputs(step, limits.page_size, limits.vocab_size, layout)
    inputs.fill_late()
    inputs.prepared = True
    pools = VECTORS in leader.plans.plans["main"].outputs
    seconds = []
    for number in range(schedule.steps):
        begin = time.perf_counter()
        handle = launcher.launch(inputs)
        if pools:
            handle.vectors()
        else:
            handle.tokens()
        if _WARM <= number < schedule.plain:
            seconds.append(time.perf_counter() - begin)
    spans = {
        rank.index: read_spans(json.loads(leader.find_left(spans_file(rank.index)).read_bytes()))
        for rank in ranks(mesh)
    }
    traced = ranks(mesh) if schedule.traced else ()
    traces = {rank.index: leader.find_left(trace_file(rank.index)).read_bytes() for rank in traced}
    return MeshRun(seconds, spans, traces)
