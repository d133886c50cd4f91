"""Pair the region calls of two programs, and compare their backends, members and results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ingot.ir.diff.align import Pairs
from ingot.ir.diff.difference import ABSENT, Difference
from ingot.ir.diff.flat import WHOLE, Flat, Group, Item


def align_groups(one: Flat, other: Flat, pairs: Pairs) -> dict[Group, Group]:
    """Pair the calls of regions in the programs `one` and `other`. Return a dict from the first to the second.

    A region is a set of calls that are compiled together. `pairs` holds the paired calls inside regions. Regions that
    share the most of them are paired first. Regions without calls come last.
    """
    common: dict[tuple[Group, Group], int] = {}
    for item, twin in pairs.after.items():
        if item.group is not None and twin.group is not None:
            common[item.group, twin.group] = common.get((item.group, twin.group), 0) + 1
    matched: dict[Group, Group] = {}
    taken: set[Group] = set()
    alike = [(left, right) for left in one.groups for right in other.groups if not left.members and not right.members]
    for left, right in [*sorted(common, key=lambda both: -common[both]), *alike]:
        if left not in matched and right not in taken:
            matched[left] = right
            taken.add(right)
    return matched


def region_changes(groups: dict[Group, Group], pairs: Pairs) -> Iterator[Difference]:
    """Yield the differences between two paired regions: in backend, in the calls inside, and in results.

    A region is a set of calls that are compiled together. `groups` maps regions of one program to regions of the other.
    `pairs` holds the paired calls inside them.
    """
    for group, twin in groups.items():
        yield from _changes(group, twin, _fields(group, twin, pairs))


def signature_changes(groups: dict[Group, Group]) -> Iterator[Difference]:
    """Yield the differences between paired regions in surplus inputs and declared types.

    A region is a set of calls that are compiled together. Surplus inputs are unused or passed twice. Other differences
    cause these differences too, so use this only if there are no others.
    """
    for group, twin in groups.items():
        fields = ("surplus inputs", str(group.surplus), str(twin.surplus)), ("type", group.unfit, twin.unfit)
        yield from _changes(group, twin, fields)


def _changes(group: Group, twin: Group, fields: Iterable[tuple[str, str, str]]) -> Iterator[Difference]:
    for field, old, new in fields:
        if old != new:
            yield Difference("region", group.name, twin.name, field, old or ABSENT, new or ABSENT, **_place(twin))


def _fields(group: Group, twin: Group, pairs: Pairs) -> Iterator[tuple[str, str, str]]:
    yield "backend", group.backend, twin.backend
    if group.backend == twin.backend:
        yield "backend of the call", group.call_backend, twin.call_backend
    left = [item for item in group.members if _elsewhere(pairs.after.get(item), twin)]
    joined = [item for item in twin.members if _elsewhere(pairs.before.get(item), group)]
    yield "calls", _listed(left), _listed(joined)
    paired = all(item in pairs.after for item in group.members) and all(item in pairs.before for item in twin.members)
    if paired and not left and not joined:
        yield "results", _results(group, lambda item: pairs.after.get(item, item)), _results(twin, lambda item: item)


def _elsewhere(item: Item | None, group: Group) -> bool:
    """Return whether `item` is a call outside the region `group` (calls that are compiled together).

    False for None and for a param.
    """
    return item is not None and item.is_call and item.group is not group


def _listed(items: list[Item]) -> str:
    return ", ".join(f"%{item.name}" for item in items)


def _results(group: Group, name: Callable[[Item], Item]) -> str:
    """Return the names of a region's results as sorted text. A region is a set of calls that are compiled together.

    `name` returns an item to take the name from. To compare two programs, it returns the item's partner.
    """
    found = [f"%{name(item).name}" + (f"[{index}]" if index != WHOLE else "") for item, index in group.results]
    return ", ".join(sorted(found))


def whole_region(group: Group, *, removed: bool) -> Difference:
    """Return the difference for a region that only one program has.

    A region is a set of calls that are compiled together.

    `removed` says that the first program has it. Otherwise the second has it.
    """
    counts: dict[str, int] = {}
    for item in group.members:
        counts[item.op] = counts.get(item.op, 0) + 1
    calls = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in counts.items())
    line = f"region {group.name} @{group.backend}: {calls or 'no calls'}"
    if removed:
        return Difference("region", group.name, "", old=line, **_place(group))
    return Difference("region", "", group.name, new=line, **_place(group))


def _place(group: Group) -> dict[str, Any]:
    return {
        "layers": () if group.layer is None else (group.layer,),
        "origin": str(group.node.meta.get("origin", "")),
        "region": group.name,
    }
