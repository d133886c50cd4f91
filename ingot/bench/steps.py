"""Where the time of steps goes: an executor that is watched while an engine drives it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.runtime.executor import SampledStep, StepLauncher
from ingot.runtime.logprobs import StepLogprobs
from ingot.runtime.step import StepInputs


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds. `decode`: one token of each of its sequences.

    launch   the host's, to start it; on a CPU all of its work
    wait     the host's, until its tokens were there
    device   on a GPU, from where it could begin to its end; None on a CPU. That holds the host's launching where the
             GPU had nothing else to do, so that a share of idle time that is reckoned from it is at most the true one
    since    on a GPU, from the end of the step before to its end, when that was in flight as this one was launched
    after_decode   whether that step was one of decoding
    """

    sequences: int
    decode: bool
    launch: float
    wait: float
    device: float | None = None
    since: float | None = None
    after_decode: bool = False


class WatchedExecutor(StepLauncher):
    """An executor whose steps are timed, by events on its `stream` where it has one. `steps` are those that retired."""

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
    """A launched step, which is noted down when its tokens are there: its events have come then."""

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
        """From an event to the end of the step."""
        if earlier is None or self._ended is None:
            return None
        self._ended.synchronize()  # it follows the one that the handle waits for
        return float(earlier.elapsed_time(self._ended)) / 1e3  # told in milliseconds

    def finish(self) -> None:
        self._handle.finish()

    def rejected(self) -> list[int]:
        return self._handle.rejected()

    def logprobs(self) -> StepLogprobs:
        return self._handle.logprobs()

    def vectors(self) -> torch.Tensor:
        return self._handle.vectors()


def decode_idle_share(steps: Sequence[StepTimes]) -> float | None:
    """How much of the time between the ends of successive decode steps a GPU had nothing to do; None without one."""
    busy = since = 0.0
    for one in steps:
        if one.decode and one.after_decode and one.device is not None and one.since is not None:
            # A step could begin when the one before had ended, however early its launch was.
            busy, since = busy + min(one.device, one.since), since + one.since
    return 1 - busy / since if since else None


def step_metrics(steps: Sequence[StepTimes], duration: float) -> dict[str, float | int | None]:
    """What the steps of a run took, of the `duration` seconds of all of it.

    `host_share` is what neither launching nor waiting took: scheduling, outputs, and sleeping until the next arrival.
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
