"""The instructions of a pipeline stage on a GPU, with the values that it shares with other stages."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingot.runtime.cuda.stage_clock import StageClock
from ingot.runtime.steps.bucket import Bucket, Watch
from ingot.runtime.steps.stage_line import StageLine


class StagedBucket(Bucket):
    """A bucket class of a pipeline stage. It receives and sends on the current stream, so a CUDA graph includes that.

    line    reaches the other stages
    clock   measures how long the GPU computes; None: nothing does. `Bucket` describes the other arguments
    """

    def __init__(self, *arguments: Any, line: StageLine, clock: StageClock | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._line, self._clock = line, clock

    def rehearse(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Run a step of padding that receives zeros and sends nothing.

        Other steps may have begun on this stage, whose tokens are received later. A transfer would take theirs.
        """
        line, self._line = self._line, self._line.without_ranks()
        try:
            self.run(inputs, sizes)
        finally:
            self._line = line

    def begin(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], watch: Watch | None = None) -> None:
        self._line.receive(self, sizes, late=False)
        ended = self._timed()
        super().begin(inputs, sizes, watch)
        ended()
        self._line.send(self, late=False)

    def end(
        self,
        sizes: Mapping[str, int],
        watch: Watch | None = None,
        before_end: Callable[[], None] = lambda: None,
    ) -> dict[str, torch.Tensor]:
        self._line.receive(self, sizes, late=True)
        ended = self._timed()

        def send() -> None:
            ended()
            self._line.send(self, late=True)
            before_end()

        return super().end(sizes, watch, send)

    def captured(self) -> Callable[[], None]:
        return super().captured() if self._clock is None else self._clock.captured()

    def _timed(self) -> Callable[[], None]:
        """Begin a part that is timed, and return the function that ends it."""
        clock = self._clock
        if clock is None:
            return lambda: None
        part = clock.begin()
        return lambda: clock.end(part)
