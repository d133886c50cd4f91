"""Measure a step on all ranks of a mesh, and add the times to the costs of its calls."""

from dataclasses import dataclass, replace
from pathlib import Path

from ingot.debug.explained import BucketCosts
from ingot.debug.mesh_time.collectives import collective_in, link_bandwidth
from ingot.debug.mesh_time.evaluate import MeshCalls, evaluate
from ingot.debug.mesh_time.merge_traces import merge_traces
from ingot.debug.mesh_time.run import run_mesh
from ingot.debug.requested_step import limits_of, step_sizes
from ingot.debug.step_time.stage_calls import calls_of
from ingot.ir.artifact.plan import BucketPlan, PlanFile
from ingot.ir.mesh import STAGES, Mesh, ranks
from ingot.ir.program import Program
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.check_target import check_target, this_machine
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.ranks.seat import rank_text


@dataclass(frozen=True)
class MeshClock:
    """Measures steps of the entry `main` on all ranks of a mesh.

    artifact   the artifact, for this machine
    mesh       the mesh that it was compiled for
    file       the plans of the ranks
    trace      a file to write the profiler's trace of all ranks to; None: no profiler runs
    """

    artifact: Artifact
    mesh: Mesh
    file: PlanFile
    trace: Path | None

    @staticmethod
    def of(artifact: Artifact, trace: Path | None) -> "MeshClock | None":
        """Return the clock of an artifact for a mesh; None if it is for one device. Raises TargetError if the artifact
        is not for this machine."""
        if not (mesh := mesh_of(artifact.manifest)):
            return None
        check_target(artifact.manifest)
        return MeshClock(artifact, mesh, read_plan_file(artifact), trace)

    def timed(self, costs: BucketCosts, program: Program) -> BucketCosts:
        """Return a copy of `costs` with the times of the step and of each call on each rank.

        Raises IngotError if the step does not run on this machine, and RankError if a rank ends or fails.
        """
        sizes = step_sizes(costs.step, program, limits_of(self.artifact).page_size)
        link = link_bandwidth(this_machine(self.artifact.manifest).device)
        stages = [calls_of(program, self._plan(costs, stage)) for stage in range(self.mesh.get(STAGES, 1))]
        collectives = {
            node.name: found
            for node in dict.fromkeys(node for stage in stages for node in stage)
            if (found := collective_in(node, program, sizes, self.mesh, link)) is not None
        }
        names = [[node.name for node in stage] for stage in stages]
        run = run_mesh(self.artifact.folder, costs.step, trace=self.trace is not None)
        if self.trace is not None:
            merge_traces({rank_text(rank): run.traces[rank.index] for rank in ranks(self.mesh)}, self.trace)
        time, of_calls = evaluate(run, self.mesh, MeshCalls(names, collectives, link))
        calls = []
        for call in costs.calls:
            on = tuple(stage for stage, own in enumerate(names) if (call.region or call.name) in own)
            call = replace(call, stages=on)
            if not call.region:
                call = replace(call, ranks=of_calls[call.name], collective=collectives.get(call.name))
            calls.append(call)
        return replace(costs, calls=tuple(calls), mesh=time)

    def _plan(self, costs: BucketCosts, stage: int) -> BucketPlan:
        """Return the plan of the ranks of a pipeline stage for the step."""
        rank = next(rank for rank in ranks(self.mesh) if rank.stage == stage)
        buckets = self.file.of(rank.index).plans[costs.entry].buckets
        return next(one for one in buckets if one.bucket.name == costs.bucket)
