"""Measure where the time of steps goes, by wrapping the executor of an engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.runtime.engines.logprobs import StepLogprobs
from ingot.runtime.steps.executor import SampledStep, StepLauncher
from ingot.runtime.steps.step import StepInputs


@dataclass(frozen=True)
class StepTimes:
    """The times of one step, in seconds. `decode` is True if the step has one token for each of its sequences.

    - `launch`: host time to launch the step; on a CPU, the whole step
    - `wait`: host time of waiting for the step's tokens
    - `device`: on a GPU, time from the step's begin to its end; None on a CPU. It includes host launch time in which
      the GPU was idle, so an idle share computed from it is a lower bound
    - `since`: on a GPU, time from the end of the previous step to the end of this one. It is None if the host had read
      the tokens of the previous step before it launched this one
    - `after_decode`: whether that previous step was a decode step
    """

    sequences: int
    decode: bool
    launch: float
    wait: float
    device: float | None = None
    since: float | None = None
    after_decode: bool = False


class WatchedExecutor(StepLauncher):
    """An executor that runs steps with another executor, and records the times of each finished step in `steps`.

    On a GPU, it records CUDA events on `stream`. On a CPU, `stream` is None.
    """

    def __init__(self, executor: StepLauncher, stream: torch.cuda.Stream | None = None) -> None:
        self.steps: list[StepTimes] = []
        self._executor = executor
        self._stream = stream
        self._last: _WatchedHandle | None = None

    def launch(self, inputs: StepInputs) -> SampledStep:
        begin, began = time.perf_counter(), self._event()
        handle = self._executor.launch(inputs)
        ended, seconds = self._event(), time.perf_counter() - begin
        tokens, sequences = inputs["tokens"].shape[0], inputs["q_lens"].shape[0]
        before = self._last if self._last is not None and self._last.in_flight else None
        self._last = _WatchedHandle(handle, self.steps, sequences, tokens == sequences, seconds, began, ended, before)
        return self._last

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class _WatchedHandle:
    """The handle of a launched step. When its tokens arrive, it appends the step's times to `steps`."""

    def __init__(
        self,
        handle: SampledStep,
        steps: list[StepTimes],
        sequences: int,
        decode: bool,
        launch: float,
        began: torch.cuda.Event | None,
        ended: torch.cuda.Event | None,
        before: "_WatchedHandle | None",
    ) -> None:
        self.in_flight = True
        self._handle, self._steps = handle, steps
        self._sequences, self._decode, self._launch = sequences, decode, launch
        self._began, self._ended = began, ended
        self._before_ended = None if before is None else before._ended
        self._after_decode = before is not None and before._decode

    def tokens(self) -> list[int]:
        begin = time.perf_counter()
        found = self._handle.tokens()
        wait = time.perf_counter() - begin
        if self.in_flight:
            self.in_flight = False
            device, since = self._seconds(self._began), self._seconds(self._before_ended)
            self._steps.append(
                StepTimes(self._sequences, self._decode, self._launch, wait, device, since, self._after_decode)
            )
        return found

    def _seconds(self, earlier: torch.cuda.Event | None) -> float | None:
        """Return the seconds from the CUDA event `earlier` to the end of this step. Without events, return None.

        There are no events on a CPU.
        """
        if earlier is None or self._ended is None:
            return None
        self._ended.synchronize()  # it comes after the event that the handle waits for
        return float(earlier.elapsed_time(self._ended)) / 1e3  # elapsed_time returns milliseconds

    def finish(self) -> None:
        self._handle.finish()

    def rejected(self) -> list[int]:
        return self._handle.rejected()

    def logprobs(self) -> StepLogprobs:
        return self._handle.logprobs()

    def vectors(self) -> torch.Tensor:
        return self._handle.vectors()


def decode_idle_share(steps: Sequence[StepTimes]) -> float | None:
    """Return the share of time in which the GPU idled during decode, from 0 to 1.

    It compares the ends of consecutive decode steps. Return None on a CPU, or if there are no such steps.
    """
    busy = since = 0.0
    for one in steps:
        if one.decode and one.after_decode and one.device is not None and one.since is not None:
            # A step can begin only when the previous one has ended, however early it was launched.
            busy, since = busy + min(one.device, one.since), since + one.since
    return 1 - busy / since if since else None


def step_metrics(steps: Sequence[StepTimes], duration: float) -> dict[str, float | int | None]:
    """Return a summary of a run's steps as JSON values. `duration` is the run's seconds.

    `launch_share` and `wait_share` are shares of the duration. `host_share` is the rest: scheduling, outputs, and
    sleeping until the next arrival. `decode_idle_share` is a share of the time of decode steps.
    """
    launch, wait = (sum(getattr(one, name) for one in steps) for name in ("launch", "wait"))
    device = [one.device for one in steps if one.device is not None]
    return {
        "steps": len(steps),
        "decode_steps": sum(1 for one in steps if one.decode),
        "mean_decode_sequences": _mean([one.sequences for one in steps if one.decode]),
        "launch_share": launch / duration,
        "wait_share": wait / duration,
        "host_share": 1 - (launch + wait) / duration,
        "device_seconds": sum(device) if device else None,
        "decode_idle_share": decode_idle_share(steps),
    }


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
