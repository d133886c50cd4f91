"""Add the times of steps on a GPU, predicted or measured, to the costs of their calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.backends.triton.launches import Launch
from ingot.debug.explained import BucketCosts, Call
from ingot.debug.requested_step import limits_of, step_sizes
from ingot.debug.step_time.device import Device, device_of
from ingot.debug.step_time.launches import Shape, compiled_launches
from ingot.debug.step_time.served import computed_size, served_size
from ingot.debug.step_time.timed import time_step
from ingot.debug.step_time.times import CallTime
from ingot.debug.step_time.work import Work, works
from ingot.ir.artifact.plan import BucketPlan, Plan, Plans
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.mesh import with_rank_rows
from ingot.ir.program import Program
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.plan_file import read_plan_file


@dataclass(frozen=True)
class StepClock:
    """Predicts how long an artifact's steps take on its GPU. With `measure`, it also measures them.

    Only steps of the entry `main` are measured. `stages` are the plans of each pipeline stage; one without stages.
    Stages run one after another, so the predicted time of a step is that of all calls. `kernels` maps ids of
    executables to their kernel launches, as recorded in the artifact. `trace` is a file to write a profiler trace of
    the measured steps to.
    """

    folder: Path
    device: Device
    stages: tuple[Plans, ...]
    kernels: Mapping[str, tuple[Launch, ...]]
    page_size: int
    measure: bool
    trace: Path | None = None

    @staticmethod
    def of(artifact: Artifact, *, measure: bool, trace: Path | None = None) -> "StepClock | None":
        """Make the clock of an artifact. Return None if the artifact's target is not a GPU, or a GPU of unknown
        bandwidth.

        With `measure`, raise OptionError instead of returning None.
        """
        target = str(artifact.manifest.target.get("name"))
        device = device_of(target) if artifact.manifest.target.get("device") == "cuda" else None
        if device is None:
            if measure:
                raise OptionError(
                    f"the artifact is for {target}",
                    where="--measure",
                    expected="an artifact for a GPU, or for a mesh; for one CPU, the golden run has the times",
                )
            return None
        stages = tuple(read_plan_file(artifact).positions.values())
        executables = {key: one for plans in stages for key, one in plans.executables.items()}
        kernels = compiled_launches(artifact, target, list(executables.values()))
        return StepClock(artifact.folder, device, stages, kernels, limits_of(artifact).page_size, measure, trace)

    def timed(self, costs: BucketCosts, program: Program, choices: Mapping[str, Sequence[Choice]]) -> BucketCosts:
        """Return a copy of `costs` with the times of the step and of each call.

        `choices` maps the names of nodes and regions to the tile sizes of their kernels. Raises TargetError if the step
        must be measured but cannot run on this machine.
        """
        found_plans = self._plans(costs)
        sizes = step_sizes(costs.step, program, self.page_size)
        # Stages capture the sizes that all of them can capture, so a size of some alone is not captured.
        graphs = [served_size(plan, bucket, costs.step, self.device.gpu) for plan, bucket in found_plans]
        served = graphs[0] if all(one == graphs[0] for one in graphs) else None
        computed = served or computed_size(*found_plans[0], costs.step)
        run = with_rank_rows({**sizes, "T": computed.T, "B": computed.B, "L": computed.L}, program.mesh)
        shape = Shape(sizes, run, costs.step.context, self.device.gpu)
        found = works(program, [bucket for _, bucket in found_plans], shape, choices, self.kernels)
        taken = None
        if self.measure and costs.entry == "main":
            from ingot.debug.step_time.measure import measure_artifact

            taken = measure_artifact(self.folder, costs.step, served, self.trace)
        calls, step = time_step(found, self.device, captured=served is not None, taken=taken)
        by_name = {work.name: (time, work) for work, time in zip(found, calls, strict=True)}
        with_times = (call if call.region else _with(call, *by_name[call.name]) for call in costs.calls)
        return replace(costs, calls=tuple(with_times), time=step)

    def _plans(self, costs: BucketCosts) -> list[tuple[Plan, BucketPlan]]:
        """Return the plan of each stage, and its instructions for the step."""
        found = [
            (plan, bucket)
            for plans in self.stages
            if (plan := plans.plans.get(costs.entry)) is not None
            for bucket in plan.buckets
            if bucket.bucket.name == costs.bucket
        ]
        if len(found) != len(self.stages):
            raise ArtifactError(
                f"there is no plan for {costs.bucket}", where="plan.json", expected="one for each program"
            )
        return found


def _with(call: Call, time: CallTime, work: Work) -> Call:
    return replace(call, time=time, work=work)
