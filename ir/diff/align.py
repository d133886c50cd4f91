"""Pair the items (placeholders and calls) of two programs, so that a diff can compare the two of each pair.

Items are paired by their computation, then by their use, then by their neighbours. A diff compares each pair in full,
so a bad pair makes a diff longer, but never empty.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from ingot.ir.diff.flat import Flat, Item

Key = Callable[[Item], Hashable | None]


@dataclass
class Pairs:
    """Pairs of items of two programs. An item is a placeholder or call. A diff compares the two items of a pair.

    `after` maps an item of the first program to its partner in the second. `before` maps the other way.
    """

    after: dict[Item, Item] = field(default_factory=dict)
    before: dict[Item, Item] = field(default_factory=dict)

    def add(self, one: Item, other: Item) -> None:
        self.after[one], self.before[other] = other, one


def align(one: Flat, other: Flat) -> Pairs:
    """Pair the items of two programs that correspond to each other. An item is a placeholder or call.

    A region (calls that are compiled together) counts as the calls inside it. Time and memory grow almost linearly with
    the sizes of the programs.
    """
    pairs = Pairs()
    for key in _SURE:
        _pair_by(key, one, other, pairs)
    _spread(pairs, list(pairs.after.items()), alone=True)
    for key in (_by_ways, _by_neighbours(pairs)):
        found = _pair_by(key, one, other, pairs, equally_many=True)
        _spread(pairs, found, alone=True)
    _spread(pairs, list(pairs.after.items()), alone=False)
    # Pair items of another op between the same neighbours, and items that changed together with all neighbours.
    for key in (_by_neighbours(pairs), _by_place):
        found = _pair_by(key, one, other, pairs, equally_many=True)
        _spread(pairs, found, alone=False)
    return pairs


def _interface(item: Item) -> Hashable | None:
    """Return a key by which inputs and states of two programs are paired, (kind, name); None for other items."""
    return (item.op, item.name) if item.op in ("input", "state") else None


def _looks(item: Item) -> Hashable:
    """Return an item's op, type, placement, backend and compiled region, as a key for pairing.

    The key decides among several items of a program that compute the same value. An item is a placeholder or call.
    """
    group = item.group.signature if item.group else -1
    return item.op, item.type, item.placement, item.backend, group


def _by_usage(item: Item) -> Hashable | None:
    return (item.op, item.usage) if item.users or item.outputs else None


def _by_ways(item: Item) -> Hashable | None:
    return (item.op, item.coarse) if item.users or item.outputs else None


def _unless_interface(key: Key) -> Key:
    return lambda item: None if item.op in ("input", "state") else key(item)


def _by_place(item: Item) -> Hashable | None:
    """Return a key for pairing items that changed much; None for inputs and states.

    For a call it is the op and the layer. For a param it is the checkpoint tensors that it is made from.
    """
    if item.recipe is not None:
        return item.op, item.recipe.sources() or str(item.recipe), item.recipe.output
    return (item.op, item.layer) if item.is_call else None


# From the most specific key to the least. A single change leaves the values of all items before it unchanged, and the
# usage of itself and of all items after it. The first key has the layer, because layers may compute the same. The
# second omits it, because layer numbers come from the names in model files and may differ.
_SURE: tuple[Key, ...] = (
    _interface,
    *map(
        _unless_interface,
        (
            lambda item: (item.value, item.usage, item.layer, _looks(item)),
            lambda item: (item.value, item.usage, _looks(item)),
            lambda item: (item.value, item.usage),
            lambda item: (item.value, _looks(item)),
            lambda item: (_by_usage(item), _looks(item)) if _by_usage(item) else None,
            lambda item: item.value,
            _by_usage,
        ),
    ),
)


def _by_neighbours(pairs: Pairs) -> Key:
    """Return a function that computes a key for pairing items that have different ops but equal neighbours.

    An item is a placeholder or call. Its key consists of the values that it reads and the calls that read it. The key
    is None unless all of these are paired already.
    """

    def key(item: Item) -> Hashable | None:
        if not item.args or not (item.users or item.outputs):
            return None
        read = [(_known(pairs, source), index) for source, index in item.args.values()]
        uses = [(_known(pairs, user), slot, index) for user, slot, index in item.users]
        if any(neighbour[0] is None for neighbour in (*read, *uses)):
            return None
        return tuple(read), frozenset(uses), frozenset(item.outputs)

    return key


def _known(pairs: Pairs, item: Item) -> Item | None:
    """Return the partner of `item` in the second program; None if it has none.

    If `item` is itself a paired item of the second program, it is returned.
    """
    return pairs.after.get(item) or (item if item in pairs.before else None)


def _pair_by(key: Key, one: Flat, other: Flat, pairs: Pairs, *, equally_many: bool = False) -> list[tuple[Item, Item]]:
    """Pair items of two programs that have equal keys, add them to `pairs`, and return the new pairs.

    An item is a placeholder or call. An item is skipped if it is paired already, or if its key is None. Several items
    with one key are paired in order. With `equally_many`, a key is skipped if one program has more items with it than
    the other.
    """
    left = _grouped((item for item in one.items if item not in pairs.after), key)
    right = _grouped((item for item in other.items if item not in pairs.before), key)
    found = []
    for value, items in left.items():
        others = right.get(value, [])
        if not equally_many or len(items) == len(others):
            found += list(zip(items, others, strict=False))
    for pair in found:
        pairs.add(*pair)
    return found


def _grouped(items: Iterable[Item], key: Key) -> dict[Hashable, list[Item]]:
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        if (value := key(item)) is not None:
            groups.setdefault(value, []).append(item)
    return groups


def _spread(pairs: Pairs, queue: list[tuple[Item, Item]], *, alone: bool) -> None:
    """Pair the neighbours of the pairs in `queue`, then the neighbours of the new pairs, and so on.

    An item is a placeholder or call. If the items of a pair read two values as the same argument, these values are
    paired. Calls that read the items of a pair are paired if their ops are equal and their other arguments are paired.
    With `alone`, they are paired only if no other calls match.
    """
    while queue:
        one, other = queue.pop()
        found = []
        for slot, (source, index) in one.args.items():
            twin, place = other.args.get(slot, (None, 0))
            if twin is not None and place == index and _free(source, twin, pairs):
                pairs.add(source, twin)
                found.append((source, twin))
        left, right = _readers(one, pairs.after, pairs), _readers(other, pairs.before, pairs)
        for key, users in left.items():
            others = right.get(key, [])
            if len(users) == len(others) and (len(users) == 1 or not alone):
                for pair in zip(users, others, strict=True):
                    if _free(*pair, pairs):
                        pairs.add(*pair)
                        found.append(pair)
        queue += found


def _free(one: Item, other: Item, pairs: Pairs) -> bool:
    return one.op == other.op and one not in pairs.after and other not in pairs.before


def _readers(item: Item, taken: dict[Item, Item], pairs: Pairs) -> dict[Hashable, list[Item]]:
    """Return the unpaired calls that read an item, grouped by a key. Calls with equal keys may be paired.

    The key has the call's op, the argument in which it reads the item, and the partners of all its arguments. `taken`
    maps paired items of the item's program to their partners.
    """
    readers: dict[Hashable, list[Item]] = {}
    for user, slot, index in item.users:
        if user not in taken:
            read = tuple((name, _known(pairs, source), place) for name, (source, place) in user.args.items())
            readers.setdefault((user.op, slot, index, read), []).append(user)
    return readers
