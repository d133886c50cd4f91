"""Recomputation of token-count rows, for sequences that resume after tokens that they did not feed in this row."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import GENERATED, IN_PROMPT


@dataclass(frozen=True)
class Recount:
    """A row of `token_counts`, and the prompt and output tokens of its sequence that are in the cache."""

    row: int
    prompt: list[int]
    generated: list[int]


_COUNTS = "token_counts"


def recount(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Recompute the token-count rows in `inputs.recounts`, to the counts that `ingot.count_tokens` would have made.

    `own` are the state names of the running entry. Do nothing if they do not include token counts: before a later entry
    of the step, the rows already count the step's own tokens.
    """
    if _COUNTS not in own:
        return
    for one in getattr(inputs, "recounts", ()):
        counts = states[_COUNTS][one.row]
        counts.zero_()
        counts[torch.tensor(one.prompt, dtype=torch.int64, device=counts.device)] = IN_PROMPT
        ids = torch.tensor(one.generated, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, ids, torch.full_like(ids, GENERATED, dtype=counts.dtype))
