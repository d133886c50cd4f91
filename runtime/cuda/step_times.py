"""How long the GPU runs the steps that it is given, for whoever asks what it waits for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ingot.runtime.step import StepSizes


@dataclass(frozen=True)
class StepTime:
    """A step of `tokens` tokens of `sequences` sequences, and the seconds from its first kernel's begin to its last
    one's end."""

    tokens: int
    sequences: int
    seconds: float


class StepTimes:
    """The times of steps, by events on the stream that they run on: a microsecond or two of each."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def step(self, sizes: StepSizes) -> Iterator[None]:
        """What is launched within, on the current stream, is a step of these sizes. One that fails has no time."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._steps.append((sizes.T, sizes.B, begin, end))

    def read(self) -> list[StepTime]:
        """Of all steps since the last call, in order; waits for them."""
        steps, self._steps = self._steps, []
        for _, _, _, end in steps:
            end.synchronize()
        return [StepTime(tokens, sequences, begin.elapsed_time(end) / 1e3) for tokens, sequences, begin, end in steps]
