"""Recomputation of token counts, which penalties need, for a sequence that resumes after tokens in another device
row."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import GENERATED, IN_PROMPT


@dataclass(frozen=True)
class Recount:
    """A device row (an index in the per-sequence tensors) whose token counts, which penalties use, must be recomputed.
    `prompt` and `generated` are the tokens to count."""

    row: int
    prompt: list[int]
    generated: list[int]


_COUNTS = "token_counts"


def recount(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Recompute token counts, which penalties use, for the device rows in `inputs.recounts`. The state `token_counts`
    has them on the device.

    own      the names of the states of the program that is about to run. Do nothing if `token_counts` is not among
             them: a program that runs later in the step, such as a draft model, must not undo what an earlier one
             counted
    states   all states by name
    inputs   the step's inputs; if they are a plain dict of tensors, there is nothing to recompute
    """
    if _COUNTS not in own:
        return
    for one in getattr(inputs, "recounts", ()):
        counts = states[_COUNTS][one.row]
        counts.zero_()
        counts[torch.tensor(one.prompt, dtype=torch.int64, device=counts.device)] = IN_PROMPT
        ids = torch.tensor(one.generated, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, ids, torch.full_like(ids, GENERATED, dtype=counts.dtype))
