"""Rows of token counts, for sequences that go on after tokens that they have not fed themselves."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import GENERATED, IN_PROMPT


@dataclass(frozen=True)
class Recount:
    """A row of `token_counts`, and the tokens of its prompt and of its output that stand in the cache."""

    row: int
    prompt: list[int]
    generated: list[int]


_COUNTS = "token_counts"


def recount(own: Collection[str], states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Let the rows that a step's inputs name count what `ingot.count_tokens` would have counted.

    `own` are the names of the states of the entry that runs. Nothing is done where it does not count: in front of a
    later entry of the step the rows have counted the step's own tokens.
    """
    if _COUNTS not in own:
        return
    for one in getattr(inputs, "recounts", ()):
        counts = states[_COUNTS][one.row]
        counts.zero_()
        counts[torch.tensor(one.prompt, dtype=torch.int64, device=counts.device)] = IN_PROMPT
        ids = torch.tensor(one.generated, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, ids, torch.full_like(ids, GENERATED, dtype=counts.dtype))
