"""A launcher that records the steps of an engine."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ingot import LLM


@dataclass
class RecordedSteps:
    """Passes steps on to the artifact of `llm`.

    keep     names of outputs
    tokens   how many tokens each step fed
    outputs  copies of the outputs `keep` of each step but the last: the next step may write them anew
    """

    llm: LLM
    keep: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _last: Any = None

    def launch(self, inputs: Any) -> Any:
        if self._last is not None:
            self.outputs.append({name: self._last.outputs[name].detach().clone().cpu() for name in self.keep})
        self.tokens.append(inputs.sizes.T)
        self._last = self.llm.loaded.round.launch(inputs)
        return self._last
