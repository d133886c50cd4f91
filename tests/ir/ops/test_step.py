"""What feeds a step and what ends it against a model in plain Python."""

import pytest
import torch
from op_values import ints, random_step

from ingot.ir.ops import OPS


@pytest.mark.parametrize("seed", range(40))
def test_feed_and_advance_against_a_plain_model(seed: int) -> None:
    args, page_size = random_step(seed)
    tokens, seqs, starts, lens, rows, begins, table, last, position = (arg.tolist() for arg in args)
    ids: list[int] = []
    places: list[int] = []
    slots: list[int] = []
    for i, token in enumerate(tokens):
        b = seqs[i]
        if b < 0:
            ids, places, slots = [*ids, 0], [*places, 0], [*slots, -1]
            continue
        begin = begins[b] if begins[b] >= 0 else position[rows[b]]
        place = begin + i - starts[b]
        ids.append(last[rows[b]] if token == -1 else token)
        places.append(place)
        slots.append(table[b][place // page_size] * page_size + place % page_size)
    kv_lens = []
    for b, row in enumerate(rows):
        begin = begins[b] if begins[b] >= 0 else position[row]
        kv_lens.append(begin + lens[b] if row >= 0 else 0)
    found = OPS["feed"].reference(*args, page_size=page_size)
    assert [tensor.tolist() for tensor in found] == [ids, places, slots, kv_lens]

    sampled = torch.arange(100, 100 + len(rows), dtype=torch.int32)
    index = ints(*((b + seed) % len(rows) if (b * 7 + seed) % 3 else -1 for b in range(len(rows))))
    for b, row in enumerate(rows):
        if row >= 0:
            position[row] = kv_lens[b]
            if index[b] >= 0:
                last[row] = int(sampled[index[b]])
    moved = OPS["advance"].reference(args[7], args[8], args[4], found[3], sampled, index)
    assert [tensor.tolist() for tensor in moved] == [last, position]


def test_advance_takes_back_what_is_rejected() -> None:
    """Rows 2, 0, 3 feed 3, 1 and 2 tokens, each with its row of logits; row 3 commits nothing, row 1 is not fed."""
    last, position = ints(90, 91, 92, 93), ints(10, 11, 12, 13)
    sampled = ints(70, 71, 72, 80, 60, 61)
    args = (ints(2, 0, -1, 3), ints(15, 11, 0, 15), sampled, ints(2, 3, -1, -1))
    found = OPS["advance"].reference(last, position, *args, ints(2, 0, 0, 2))
    assert [tensor.tolist() for tensor in found] == [[80, 91, 70, 93], [11, 11, 13, 13]]
    none = OPS["advance"].reference(last, position, *args, ints(0, 0, 0, 0))
    assert all(map(torch.equal, none, OPS["advance"].reference(last, position, *args)))
