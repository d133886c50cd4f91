"""count_tokens by Triton kernels against its reference."""

import pytest
import torch
from odd_samples import odd_samples
from op_values import ints
from triton_checks import check_lowering
from triton_schedules import TESTED

from ingot.backends.triton.lower.sampling.penalties import LOWERINGS
from ingot.ir.ops import OPS


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("name", LOWERINGS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        check_lowering(op, LOWERINGS[name], sample.args, sample.kwargs)


# Prompts and decoding mixed, tokens that repeat, sequences without asks and padding; a vocabulary of more than a share.
@pytest.mark.parametrize("seed", range(4))
def test_count_tokens(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    sequences, slots, vocab = 4, 6, [9, 1500, 9, 17000][seed]
    lens = draw(1, 20, sequences)
    seqs = torch.arange(sequences).repeat_interleave(lens).int()
    begins = draw(0, 2, sequences) * draw(0, 9, sequences)
    positions = torch.cat([torch.arange(int(n)) + int(b) for n, b in zip(lens, begins, strict=True)]).int()
    ends = draw(0, 9, sequences)
    ends[int(draw(0, sequences, 1))] = -1
    seqs, positions = torch.cat([seqs, ints(-1, -1)]), torch.cat([positions, ints(0, 0)])
    ids = draw(0, min(vocab, 12), len(seqs)) * (vocab // 12 or 1)
    rows = torch.randperm(slots, generator=g)[:sequences].int()
    counts = draw(0, 9, slots, vocab)
    args = (counts, ids, positions, seqs, rows, ends)
    for tokens in ((1, 16), (1, 8192)):  # all tokens at once, and in turns
        check_lowering(OPS["count_tokens"], LOWERINGS["count_tokens"], args, {}, tokens=tokens, dims={"T": len(ids)})
