"""The measurement of one rank of a mesh: it records steps, and leaves the result for rank 0 in a file."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ingot.ir.machine.load_context import Communicator, LoadContext
from ingot.ir.machine.meeting import UNWRITTEN, leave_file
from ingot.runtime.ranks.measuring.clock import GpuClock
from ingot.runtime.ranks.measuring.recorder import SpanRecorder, spans_json
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule, StepKind
from ingot.runtime.steps.executor import Executor, SampledStep, StepHandle, StepLauncher
from ingot.runtime.steps.late_step import LateStep
from ingot.runtime.steps.step import StepInputs


def spans_file(rank: int) -> str:
    """Return the name of the file with the spans of a rank."""
    return f"spans.{rank}.json"


def trace_file(rank: int) -> str:
    """Return the name of the file with the profiler's trace of a rank."""
    return f"trace.{rank}.json"


class RankMeasurement:
    """The measurement of one rank.

    rank       the index of the rank
    folder     the folder in which ranks meet. The results are left there
    schedule   which steps are recorded
    """

    def __init__(self, rank: int, folder: Path, schedule: MeasuringSchedule) -> None:
        self._rank, self._folder, self._schedule = rank, folder, schedule
        self._recorder = SpanRecorder()

    def connections(self, found: Mapping[str, Communicator]) -> dict[str, Communicator]:
        """Return the connections of the rank. Transfers between pipeline stages are recorded."""
        return self._recorder.connections(found)

    def launcher(self, executor: Executor, context: LoadContext) -> StepLauncher:
        """Return what runs the steps of the rank, through the executor of the main program."""
        activities = [ProfilerActivity.CPU]
        if context.stream is not None:
            most = max(len(bucket.instructions) for bucket in executor.plan.buckets)
            self._recorder.clock = GpuClock(context.stream, most)
            activities.append(ProfilerActivity.CUDA)
        return _MeasuredSteps(executor, self._recorder, self._schedule, profile(activities=activities), self._leave)

    def _leave(self, profiler: profile) -> None:
        if self._schedule.traced:
            made = self._folder / trace_file(self._rank)
            unwritten = made.with_name(made.name + UNWRITTEN)
            profiler.export_chrome_trace(str(unwritten))
            os.replace(unwritten, made)
        spans = spans_json(self._recorder.spans())
        leave_file(self._folder / spans_file(self._rank), json.dumps(spans).encode())


class _MeasuredSteps(StepLauncher):
    """Runs the steps of a schedule, one at a time: a step begins when the one before has ended.

    executor   runs them
    recorder   records them
    schedule   what to do with each
    profiler   records the traced ones
    leave      called after the last step
    """

    def __init__(
        self,
        executor: Executor,
        recorder: SpanRecorder,
        schedule: MeasuringSchedule,
        profiler: profile,
        leave: Callable[[profile], None],
    ) -> None:
        self._executor, self._recorder, self._schedule = executor, recorder, schedule
        self._profiler, self._leave = profiler, leave
        self._begun = 0

    def launch(self, inputs: StepInputs) -> SampledStep:
        kind = self._schedule.kind(self._begun)
        self._recorder.begin(kind)
        if self._begun == self._schedule.preparing:
            self._profiler.prepare_trace()
        elif kind is StepKind.TRACED and self._begun == self._schedule.steps - self._schedule.traced:
            self._profiler.start_trace()
        self._begun += 1
        handle = self._executor.launch(inputs, None if kind is StepKind.PLAIN else self._recorder.watch)
        if not isinstance(handle, LateStep):
            self._end()
            return handle

        def end() -> StepHandle:
            handle.finish()
            self._end()
            return handle

        return LateStep(handle.bucket, end)

    def _end(self) -> None:
        """End a step; after the last one, leave what was recorded."""
        if self._begun != self._schedule.steps:
            return
        if self._schedule.traced:
            self._executor.synchronize()
            self._profiler.stop_trace()
        self._leave(self._profiler)
