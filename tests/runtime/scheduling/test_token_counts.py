"""Counts of tokens that were not fed are those that the op would have made of them."""

import pytest
import torch

from ingot.ir.ops import OPS
from ingot.runtime.steps.step import StepBuffer, StepLayout, StepSizes
from ingot.runtime.steps.token_counts import Recount, recount

VOCAB = 23


@pytest.mark.parametrize("prompt_len", [1, 5, 12])
@pytest.mark.parametrize("fed", [0, 7])
def test_a_row_is_counted_as_the_op_counts_it(prompt_len, fed):
    draw = torch.Generator().manual_seed(prompt_len)
    prompt, generated = (torch.randint(0, VOCAB, (n,), generator=draw).int() for n in (prompt_len, fed))
    before = torch.randint(0, 9, (4, VOCAB), generator=draw).int()
    ids, row = torch.cat([prompt, generated]), torch.tensor([2]).int()
    positions, seqs = torch.arange(len(ids)).int(), torch.zeros(len(ids)).int()
    expected = OPS["count_tokens"].reference(before, ids, positions, seqs, row, torch.tensor([prompt_len]).int())
    inputs = StepBuffer(StepLayout.usual(), StepSizes(1, 1, 1, 1)).views(StepSizes(1, 1, 1, 1))
    recount({"token_counts"}, {}, inputs)  # nothing is asked for
    inputs.recounts = (Recount(2, prompt.tolist(), generated.tolist()),)
    counts = before.clone()
    recount({"last_token"}, {"token_counts": counts}, inputs)
    assert torch.equal(counts, before), "an entry that does not count"
    recount({"token_counts"}, {"token_counts": counts}, inputs)
    assert torch.equal(counts, expected) and not torch.equal(counts, before)
