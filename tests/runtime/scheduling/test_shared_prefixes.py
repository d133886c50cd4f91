"""Which sequences of a step form groups, by the pages that they begin with; and steps whose tables say so."""

import random

import numpy as np
import pytest
from served import GREEDY, Served

from ingot.ir.artifact.plan import GroupMemory, Plan, ResidentMemory, State
from ingot.ir.features.sharing import COUNT, FIRST, LEADER, LENGTH, MEMBER, MOST_GROUPS, OWN
from ingot.ir.machine.gpus import TYPICAL
from ingot.runtime.pages.shared_prefixes import least_saved, sharing_of

PAGE = 16


def groups_of(sequences: list[list[int]], least: int = 1, order: list[int] | None = None) -> dict[frozenset[int], int]:
    """The groups of sequences that hold such pages, and the pages that each shares. Device rows are in another order
    than the sequences of the step."""
    rows = order or list(reversed(range(len(sequences))))
    pages = np.zeros((len(sequences), max(map(len, sequences)) + 2), np.int32)
    held = np.zeros(len(sequences), np.int32)
    for row, own in zip(rows, sequences, strict=True):
        pages[row, : len(own)] = own
        held[row] = len(own)
    table = sharing_of(pages, held, np.array(rows, np.int32), PAGE, least)
    if table is None:
        return {}
    assert len(table) == len(sequences)
    found = {}
    for row in table[table[:, COUNT] > 0].tolist():
        members = table[row[FIRST] : row[FIRST] + row[COUNT], MEMBER].tolist()
        assert members[0] == row[LEADER] and (table[members, OWN] == row[LENGTH]).all()
        found[frozenset(members)] = row[LENGTH] // PAGE
    grouped = {member for members in found for member in members}
    assert all(table[place, OWN] == 0 for place in range(len(sequences)) if place not in grouped)
    return found


def test_nothing_in_common() -> None:
    assert groups_of([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]) == {}
    assert groups_of([[1, 2, 3, 4, 5]]) == {}
    # Unused entries of page tables are 0, as is the first page of a pool.
    assert groups_of([[0, 1], [2]]) == {}


def test_groups_are_as_long_as_what_all_members_hold() -> None:
    trunk = list(range(6))
    assert groups_of([[*trunk, 10], [20, 21], [*trunk, 11, 12], trunk]) == {frozenset({0, 2, 3}): 6}
    assert groups_of([[*trunk, 10], [*trunk[:5], 11]]) == {frozenset({0, 1}): 5}


def test_too_little_in_common_is_no_group() -> None:
    assert groups_of([[1, 2, 3, 9], [1, 2, 3, 8]]) == {}
    alike = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 3, 4, 7]]
    assert groups_of(alike, least=2 * 4 * PAGE) == {frozenset({0, 1, 2}): 4}
    assert groups_of(alike, least=2 * 4 * PAGE + 1) == {}


def test_of_nested_groups_those_that_save_more_are_taken() -> None:
    trunk = [1, 2, 3, 4]
    long, other = list(range(10, 30)), list(range(40, 70))
    sequences = [[*trunk, *long, 100], [*trunk, *other, 101], [*trunk, *long, 102], [*trunk, *other, 103]]
    assert groups_of(sequences) == {frozenset({0, 2}): 24, frozenset({1, 3}): 34}
    # One more page of some is worth less than the page that all share.
    assert groups_of([[*trunk, 5, 100], [*trunk, 5, 101], [*trunk, 102], [*trunk, 103]]) == {frozenset({0, 1, 2, 3}): 4}


def test_more_groups_than_a_table_holds() -> None:
    sequences = [[group * 1000 + place for place in range(4 + group)] for group in range(MOST_GROUPS + 3)] * 2
    found = groups_of(sequences)
    assert len(found) == MOST_GROUPS and min(found.values()) == 7, "those that save least are left out"


@pytest.mark.parametrize("seed", range(20))
def test_any_groups_are_true(seed: int) -> None:
    """Members hold the same pages; no sequence is in two groups."""
    draw = random.Random(seed)
    made: list[list[int]] = [[]]
    sequences = []
    for number in range(draw.randrange(2, 40)):
        own = [*draw.choice(made), *range(1000 * number, 1000 * number + draw.randrange(1, 12))]
        made.append(own)
        sequences.append(own)
    order = draw.sample(range(len(sequences)), len(sequences))
    seen: set[int] = set()
    for members, count in groups_of(sequences, order=order).items():
        first, *others = (sequences[member][:count] for member in members)
        assert len(first) == count and others and all(one == first for one in others)
        assert not seen & members
        seen |= members


def test_what_has_to_be_saved_follows_from_the_bytes_of_a_position() -> None:
    states = {f"kv.{layer}": State(kind="paged_kv", group="full", unit="token", type="") for layer in range(4)}
    states["kv.9"] = State(kind="paged_kv", group="window_8", unit="token", type="")
    groups = {"full": GroupMemory(page=4 * PAGE * 2048, pages_per_sequence=9)}
    memory = ResidentMemory(weights=0, states=0, groups=groups, inputs=0, outputs=0)
    plan = Plan.model_construct(states=states, memory=memory)
    assert least_saved(plan, TYPICAL["sm_90"], PAGE) == -(-6e-6 * 4.8e12 // 2048)


def test_steps_that_only_decode_share_what_the_prefix_cache_found() -> None:
    served = Served(num_pages=200, max_seq_len=128, max_tokens=64)
    trunk = list(range(1, 41))
    served.engine.add_request("first", trunk, GREEDY)
    while served.engine.has_unfinished():
        served.engine.step()
    for number in range(3):
        served.engine.add_request(str(number), [*trunk, 50 + number], GREEDY)
    while served.engine.has_unfinished():
        served.engine.step()
    assert served.device.num_shared >= 7
