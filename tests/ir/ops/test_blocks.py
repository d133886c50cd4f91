"""What a step finds of a block, position by position, against plain Python over drawn blocks."""

import math
import random

import pytest
import torch

from ingot.ir.errors import VerifyError
from ingot.ir.ops import OPS

BLOCK, VOCAB, MASK_TOKEN = 4, 9, 8


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("steps", "sure"), [(4, 100), (2, 40), (1, 100), (4, 25)])
@pytest.mark.parametrize("seed", range(4))
def test_the_surest_positions_get_tokens(seed: int, steps: int, sure: int) -> None:
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, found, rows, starts, lens, index = [], [], [], [], [], []
    for _ in range(6):
        count = BLOCK + draw.choice([0, 3])
        known = draw.choice([[draw.random() < 0.5 for _ in range(BLOCK)], [True] * BLOCK])
        starts.append(len(tokens))
        lens.append(count)
        tokens += [draw.randrange(VOCAB - 1) for _ in range(count)]
        found += [1] * (count - BLOCK) + [int(one) for one in known]
        rows += range(len(tokens) - BLOCK, len(tokens))
        index.append(len(rows) - 1)
    logits = torch.randn(len(rows), VOCAB, generator=g) * 2
    logits[rows.index(starts[1] + lens[1] - 2)] = math.nan
    logits[index[2] - 3 : index[2] + 1] = logits[index[2]].clone()  # equals: the first one is taken
    step = (ints(tokens), ints(found), ints(rows), ints(starts), ints(lens), ints(index))
    options = {"block": BLOCK, "steps": steps, "sure_percent": sure}
    committed, rejected, taken, blocks = OPS["fill_block"].reference(logits, *step, **options)
    for b, last in enumerate(index):
        own, places = range(last - BLOCK + 1, last + 1), range(starts[b] + lens[b] - BLOCK, starts[b] + lens[b])
        known, fed = [found[place] == 1 for place in places], [tokens[place] for place in places]
        if b == 1 or all(known):
            assert (rejected[b], taken[b], blocks[b].tolist()) == (0, last, [-1] * BLOCK)
            assert [committed[row] for row in own] == ([-1] * BLOCK if b == 1 else fed)
            continue
        chance = logits[own].softmax(-1).amax(-1).tolist()
        surest = sorted((i for i in range(BLOCK) if not known[i]), key=lambda i: -chance[i])
        new = {i for rank, i in enumerate(surest) if rank < -(-BLOCK // steps) or chance[i] * 100 > sure}
        best = logits[own].argmax(-1).tolist()
        assert blocks[b].tolist() == [fed[i] if known[i] else best[i] if i in new else -1 for i in range(BLOCK)]
        assert (rejected[b], taken[b]) == (BLOCK, -1)


def test_what_a_row_holds_is_fed() -> None:
    blocks = ints([7, -1, 5, -1]).view(1, 4)
    fed = ints([3, -1, -2, -3, -4, -5, 0])
    ids, found = OPS["take_block"].reference(fed, ints([0] * 6 + [-1]), ints([0]), blocks, mask_token=MASK_TOKEN)
    assert ids.tolist() == [3, MASK_TOKEN, 7, MASK_TOKEN, 5, MASK_TOKEN, 0]
    assert found.tolist() == [1, 0, 1, 0, 1, 0, 1]


def test_pieces_of_prompts_and_single_rows_have_no_block() -> None:
    """A piece without a row of logits, a token with one, and fewer rows than a block has."""
    step = (ints([1] * 12), ints([1] * 12), ints([5, 8, 9, 10, 11]), ints([0, 5, 6]), ints([5, 1, 6]))
    options = {"block": BLOCK, "steps": 4, "sure_percent": 90}
    logits = torch.randn(5, VOCAB)
    *_, rejected, taken, blocks = OPS["fill_block"].reference(logits, *step, ints([-1, 0, 2]), **options)
    assert rejected.tolist() == [0, 0, 0] and taken.tolist() == [-1, 0, 2] and blocks.unique().tolist() == [-1]


def test_attributes_that_make_no_sense() -> None:
    tokens = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(VerifyError, match="mask_token is -1"):
        OPS["take_block"](tokens, tokens, tokens, tokens.view(1, 4), mask_token=-1)
    for block, steps in ((1, 1), (4, 5), (4, 0)):
        with pytest.raises(VerifyError, match=f"a block of {block} positions in {steps} steps"):
            logits = torch.empty(4, 9, device="meta")
            OPS["fill_block"](logits, *[tokens] * 6, block=block, steps=steps, sure_percent=90)
