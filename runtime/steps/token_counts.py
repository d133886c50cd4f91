"""Recomputation of token counts, which penalties need, for a sequence that resumes after tokens in another device
row."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import GENERATED, IN_PROMPT


@dataclass(frozen=True)
class Recount:
    """An order to recompute the token counts of one sequence on the device. Penalties use the counts.

    row         the sequence's device row (its index in the per-sequence tensors)
    prompt      the prompt tokens to count
    generated   the generated tokens to count
    """

    row: int
    prompt: list[int]
    generated: list[int]


_COUNTS = "token_counts"


def recount(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Recompute token counts on the device for the sequences in `inputs.recounts`. Penalties use the counts. They are
    in the state `token_counts`.

    own      the names of the states of the program that is about to run; do nothing if `token_counts` is not one of
             them. In a step, only the first program recounts, and a later draft model does not
    states   all states by name
    inputs   the step's inputs; a plain dict of tensors has nothing to recompute
    """
    if _COUNTS not in own:
        return
    for one in getattr(inputs, "recounts", ()):
        counts = states[_COUNTS][one.row]
        counts.zero_()
        counts[torch.tensor(one.prompt, dtype=torch.int64, device=counts.device)] = IN_PROMPT
        ids = torch.tensor(one.generated, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, ids, torch.full_like(ids, GENERATED, dtype=counts.dtype))
