"""Which sequences of a step begin with the same pages, so that attention reads these once.

Sequences form groups by the pages that they share, which the prefix cache gave them. A group that has much in common
may fall into groups that have more: of both, what saves more reads is taken. The table is that of
`ingot.ir.features.sharing`.
"""

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from ingot.ir.artifact.plan import Plan
from ingot.ir.cache.groups import FULL
from ingot.ir.features.asking import Array
from ingot.ir.features.sharing import COLUMNS, COUNT, FIRST, LEADER, LENGTH, MEMBER, MOST_GROUPS, OWN
from ingot.ir.machine.gpus import Gpu

# Pages that a group shares at least: those of a tile of keys, as long as pages have 16 positions as usual.
_FEWEST = 4
# Seconds that reading prefixes apart takes a layer in any case: a launch more, which the rest of the attention waits
# for. On an H200 (Triton 3.6.0) that launch takes 10.8 us where 64 sequences share 2048 positions, and 25.4 us where
# they share 8192: by a straight line 6 us for none.
_APART = 6e-6
# Groups of groups that are looked into: prompts of a system, of its examples, of a conversation.
_DEEPEST = 4

PrefixGroup = tuple[Array, int]  # the sequences of the step, and the pages that they begin with


def sharing_of(pages: Array, held: Array, rows: Array, page_size: int, least: int) -> Array | None:
    """The table of a step of the sequences in `rows`, by `pages` i32[rows, P], of which each has `held` i32[rows].

    None where it saves the reads of fewer than `least` positions.
    """
    first = pages[rows, 0]
    order = np.argsort(first, kind="stable")
    if len(rows) < 2 or not (first[order[1:]] == first[order[:-1]]).any():
        return None
    found = [
        (members, count)
        for alike in _alike(first, order)
        for members, count in _best(pages, held, rows, alike, 0, _DEEPEST)
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


def _alike(values: Array, order: Array) -> Iterator[Array]:
    """Of the sequences `order`, sorted by their `values`, those of equal value, where there are several."""
    ends = np.flatnonzero(np.diff(values[order])) + 1
    return (one for one in np.split(order, ends) if len(one) > 1)


def _best(pages: Array, held: Array, rows: Array, members: Array, known: int, depth: int) -> list[PrefixGroup]:
    """The groups of `members`, which begin with `known` equal pages, that save most reads: all of them together, or
    groups of those that have more in common."""
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
        if len(alike := list(one[1])) > 1
        for found in _best(pages, held, rows, longer[alike], count, depth - 1)
    ]
    return apart if _saved(apart) > _saved(together) else together


def _saved(groups: list[PrefixGroup]) -> int:
    """Pages that are not read, since a group reads them once."""
    return sum((len(members) - 1) * count for members, count in groups)


def least_saved(plan: Plan, gpu: Gpu, page_size: int) -> int:
    """Positions whose reads a step has to save, before it pays to read shared prefixes apart."""
    layers = sum(state.group == FULL.name for state in plan.states.values())
    position = plan.memory.groups[FULL.name].page / layers / page_size  # bytes, in one layer
    return math.ceil(_APART * (gpu.bandwidth or 0) / position)
