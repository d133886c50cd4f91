"""Pair the region calls of two programs, and compare their backends, members and results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ingot.ir.diff.align import Pairs
from ingot.ir.diff.difference import ABSENT, Difference
from ingot.ir.diff.flat import WHOLE, Flat, Group, Item


def align_groups(one: Flat, other: Flat, pairs: Pairs) -> dict[Group, Group]:
    """Return which region calls of two programs correspond: a dict from those of `one` to those of `other`.

    Regions with the most paired calls in their bodies are paired first, regions with empty bodies last. `pairs` holds
    the paired calls.
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
    """Yield the differences between paired region calls in backend, in the calls of the body, and in results.

    `groups` maps region calls of one program to those of the other, `pairs` the calls in their bodies.
    """
    for group, twin in groups.items():
        yield from _changes(group, twin, _fields(group, twin, pairs))


def signature_changes(groups: dict[Group, Group]) -> Iterator[Difference]:
    """Yield the differences between paired region calls in surplus inputs and declared types.

    Only use it for programs without other differences, because these cause such differences too.
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
    """Return whether `item` is a call outside the region call `group`; False for None and for a param."""
    return item is not None and item.is_call and item.group is not group


def _listed(items: list[Item]) -> str:
    return ", ".join(f"%{item.name}" for item in items)


def _results(group: Group, name: Callable[[Item], Item]) -> str:
    """Return the names of a region's results as sorted text.

    To compare two programs, `name` maps an item to the one that provides its name, such as its partner.
    """
    found = [f"%{name(item).name}" + (f"[{index}]" if index != WHOLE else "") for item, index in group.results]
    return ", ".join(sorted(found))


def whole_region(group: Group, *, removed: bool) -> Difference:
    """Return the difference for a region call that only one of the two programs has.

    If `removed`, only the first program has it; else only the second.
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
