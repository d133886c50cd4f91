"""Recomputation of token counts, which penalties need, for a sequence that resumes after tokens in another device
row."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import GENERATED, IN_PROMPT


@dataclass(frozen=True)
class Recount:
    """A device row whose token counts must be recomputed, and the prompt and output tokens to count."""

    row: int
    prompt: list[int]
    generated: list[int]


_COUNTS = "token_counts"


def recount(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Recompute the rows of the state `token_counts` that `inputs.recounts` lists, as the op `count_tokens` would have
    counted.

    own      the names of the states that the entry about to run uses; do nothing if `token_counts` is not among them,
             because a later entry of the step must not undo what an earlier one counted
    states   all states by name
    inputs   the step's inputs; plain tensors by name have no `recounts`
    """
    if _COUNTS not in own:
        return
    for one in getattr(inputs, "recounts", ()):
        counts = states[_COUNTS][one.row]
        counts.zero_()
        counts[torch.tensor(one.prompt, dtype=torch.int64, device=counts.device)] = IN_PROMPT
        ids = torch.tensor(one.generated, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, ids, torch.full_like(ids, GENERATED, dtype=counts.dtype))
