"""The instructions of a pipeline stage on a GPU, with the values that it shares with other stages."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingot.runtime.steps.bucket import Bucket, Watch
from ingot.runtime.steps.stage_line import StageLine


class StagedBucket(Bucket):
    """A bucket class of a pipeline stage. It receives and sends on the current stream, so a CUDA graph includes that.

    `line` reaches the other stages. `Bucket` describes the other arguments.
    """

    def __init__(self, *arguments: Any, line: StageLine, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._line = line

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
        super().begin(inputs, sizes, watch)
        self._line.send(self, late=False)

    def end(
        self,
        sizes: Mapping[str, int],
        watch: Watch | None = None,
        before_end: Callable[[], None] = lambda: None,
    ) -> dict[str, torch.Tensor]:
        self._line.receive(self, sizes, late=True)

        def send() -> None:
            self._line.send(self, late=True)
            before_end()

        return super().end(sizes, watch, send)
