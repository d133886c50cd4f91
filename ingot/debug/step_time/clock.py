"""Add the times of steps on a GPU, predicted or measured, to the costs of their calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.backends.triton.launches import Launch
from ingot.cli.views.plan import read_plans
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
from ingot.ir.program import Program
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class StepClock:
    """Predicts how long an artifact's steps take on its GPU. With `measure`, it also measures them.

    Only steps of the entry `main` are measured. `kernels` maps ids of executables to their kernel launches, as recorded
    in the artifact. `trace` is a file to write a profiler trace of the measured steps to.
    """

    folder: Path
    device: Device
    plans: Plans
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
                    expected="an artifact for a GPU; for a CPU, the golden run has the times",
                )
            return None
        plans = read_plans(artifact)
        kernels = compiled_launches(artifact, target, list(plans.executables.values()))
        return StepClock(artifact.folder, device, plans, kernels, limits_of(artifact).page_size, measure, trace)

    def timed(self, costs: BucketCosts, program: Program, choices: Mapping[str, Sequence[Choice]]) -> BucketCosts:
        """Return a copy of `costs` with the times of the step and of each call.

        `choices` maps the names of nodes and regions to the tile sizes of their kernels. Raises TargetError if the step
        must be measured but cannot run on this machine.
        """
        plan, bucket = self._plan(costs)
        sizes = step_sizes(costs.step, program, self.page_size)
        served = served_size(plan, bucket, costs.step, self.device.gpu)
        computed = served or computed_size(plan, bucket, costs.step)
        run = {**sizes, "T": computed.T, "B": computed.B, "L": computed.L}
        found = works(program, bucket, Shape(sizes, run, costs.step.context, self.device.gpu), choices, self.kernels)
        taken = None
        if self.measure and costs.entry == "main":
            from ingot.debug.step_time.measure import measure_artifact

            taken = measure_artifact(self.folder, costs.step, served, self.trace)
        calls, step = time_step(found, self.device, captured=served is not None, taken=taken)
        by_name = {work.name: (time, work) for work, time in zip(found, calls, strict=True)}
        with_times = (call if call.region else _with(call, *by_name[call.name]) for call in costs.calls)
        return replace(costs, calls=tuple(with_times), time=step)

    def _plan(self, costs: BucketCosts) -> tuple[Plan, BucketPlan]:
        plan = self.plans.plans.get(costs.entry)
        for bucket in plan.buckets if plan is not None else ():
            if bucket.bucket.name == costs.bucket:
                assert plan is not None
                return plan, bucket
        raise ArtifactError(f"there is no plan for {costs.bucket}", where="plan.json", expected="one for each program")


def _with(call: Call, time: CallTime, work: Work) -> Call:
    return replace(call, time=time, work=work)
