"""An executor that makes it an error if a launch waits for the GPU."""

from typing import Any

import torch

from ingot.runtime.steps.step import StepInputs


class NeverWaiting:
    """An executor whose launches may not wait for the GPU."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.tokens: list[int] = []  # of each step

    def launch(self, inputs: StepInputs) -> Any:
        self.tokens.append(inputs.sizes.T)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._executor.launch(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
