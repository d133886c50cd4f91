"""Groups of sequences in a step that begin with the same pages, so that attention reads these pages once per group.

The prefix cache gave the sequences equal pages. A group may split into subgroups that share more pages; the code takes
the group or its subgroups, whichever saves more reads. `ingot.ir.features.sharing` defines the table.
"""

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from ingot.ir.artifact.plan import Plan
from ingot.ir.cache.groups import FULL
from ingot.ir.features.request_view import Array
from ingot.ir.features.sharing import COLUMNS, COUNT, FIRST, LEADER, LENGTH, MEMBER, MOST_GROUPS, OWN
from ingot.ir.machine.gpus import Gpu

# The fewest pages that a group shares: one tile of keys, at the usual 16 positions per page.
_FEWEST = 4
# Fixed cost per layer, in seconds, of reading prefixes separately: one more launch, which the rest of the attention
# waits for. On an H200 (Triton 3.6.0) that launch takes 10.8 us if 64 sequences share 2048 positions, and 25.4 us if
# they share 8192; a straight line through both yields 6 us for none.
_APART = 6e-6
# Levels of nested groups to search, such as system prompt, few-shot examples, conversation.
_DEEPEST = 4

PrefixGroup = tuple[Array, int]  # sequences of the step, and the number of first pages that they share


def sharing_of(pages: Array, held: Array, rows: Array, page_size: int, least: int) -> Array | None:
    """Find the sequences of a decode step that share prefix pages. Cascade attention reads such pages once for all of
    them. Return the table of shared prefixes, i32[sequences, columns]. `ingot.ir.features.sharing` defines its columns.

    pages       i32[device rows, P], the page table of each running sequence
    held        i32[device rows], the number of pages in each page table
    rows        the device row of each sequence of the step (its index in `pages` and `held`)
    page_size   positions in a page
    least       return None if this saves reading fewer cached positions
    """
    first = pages[rows, 0]
    order = np.argsort(first, kind="stable")
    if len(rows) < 2 or not (first[order[1:]] == first[order[:-1]]).any():
        return None
    found = [
        (members, count)
        for equals in _equal_values(first, order)
        for members, count in _best(pages, held, rows, equals, 0, _DEEPEST)
        if count >= _FEWEST
    ]
    found = sorted(found, key=lambda group: _saved([group]), reverse=True)[:MOST_GROUPS]
    if _saved(found) * page_size < least:
        return None
    table = np.zeros((len(rows), COLUMNS), np.int32)
    place = 0
    for number, (members, count) in enumerate(found):
        table[members, OWN] = count * page_size
        table[place : place + len(members), MEMBER] = members
        table[number, [FIRST, COUNT, LENGTH, LEADER]] = place, len(members), count * page_size, members[0]
        place += len(members)
    return table


def _equal_values(values: Array, order: Array) -> Iterator[Array]:
    """Yield each set of two or more sequences with equal values, as an array of sequence numbers.

    values   one number per sequence
    order    the sequence numbers, sorted by value
    """
    ends = np.flatnonzero(np.diff(values[order])) + 1
    return (one for one in np.split(order, ends) if len(one) > 1)


def _best(pages: Array, held: Array, rows: Array, members: Array, known: int, depth: int) -> list[PrefixGroup]:
    """Return the groups of sequences that save most page reads in cascade attention. This is one group of all
    `members`, or several subgroups that share more pages. A group is (its sequences, number of first pages that they
    share).

    pages     i32[device rows, P], the page table of each running sequence
    held      i32[device rows], the number of pages in each page table
    rows      the device row of each sequence of the step
    members   the sequences to group, as indices into `rows`
    known     all members share at least this many first pages
    depth     how many times subgroups may be split again
    """
    most = int(held[rows[members]].min())
    table = pages[rows[members], known:most]
    differs = (table != table[0]).any(0)
    count = known + (int(differs.argmax()) if differs.any() else most - known)
    together = [(members, count)]
    if depth == 0 or count == int(held[rows[members]].max()):
        return together
    longer = members[held[rows[members]] > count]
    following = pages[rows[longer], count]
    order = np.argsort(following, kind="stable")
    apart = [
        found
        for one in groupby(order.tolist(), key=following.__getitem__)
        if len(equals := list(one[1])) > 1
        for found in _best(pages, held, rows, longer[equals], count, depth - 1)
    ]
    return apart if _saved(apart) > _saved(together) else together


def _saved(groups: list[PrefixGroup]) -> int:
    """Return how many page reads cascade attention saves with these groups. Each group reads its shared pages once, not
    once per member."""
    return sum((len(members) - 1) * count for members, count in groups)


def least_saved(plan: Plan, gpu: Gpu, page_size: int) -> int:
    """Return how many reads of cached positions cascade attention must save in a decode step to be faster on `gpu`.
    Cascade attention costs one more kernel launch per layer. `page_size` is in tokens."""
    layers = sum(state.group == FULL.name for state in plan.states.values())
    position = plan.memory.groups[FULL.name].page / layers / page_size  # bytes, in one layer
    return math.ceil(_APART * (gpu.bandwidth or 0) / position)
