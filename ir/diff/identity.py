"""Numbers that identify what an item (placeholder or call) of a program computes and how it is used, without names."""

from collections import Counter
from collections.abc import Callable, Hashable

from ingot.ir.diff.flat import Flat, Item


class Ids:
    """Assigns a number to each key. A key has the same number each time, also for several programs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, *key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))


def identify(flat: Flat, ids: Ids) -> None:
    """Set the numbers `value`, `usage`, `coarse` and `full` of each item of `flat`.

    Items with an equal number are equal in one respect. This holds across programs if they use the same `ids`.

    value   what the item computes
    usage   the ops, constants and weights on the paths from the item to the outputs
    coarse  only the ops on these paths
    full    what the item computes, with all declared properties, such as types and backends
    """
    _look_down(flat, ids, "usage", lambda user: (user.op, *user.attrs.items(), *_leaves(user)))
    _look_down(flat, ids, "coarse", lambda user: (user.op,))
    drawn: Counter[int] = Counter()
    for item in flat.items:
        item.value = ids.of(*_value_key(item))
        if item.random:
            drawn[ids.of(item.value, item.usage)] += 1
            item.value = ids.of(item.value, item.usage, drawn[ids.of(item.value, item.usage)])
    for group in flat.groups:
        members = sorted((item.value, item.usage) for item in group.members)
        group.signature = ids.of("region", group.backend, group.call_backend, *members)
    for item in flat.items:
        item.full = ids.of(*_full_key(item))


def _leaf(item: Item) -> Hashable | None:
    """Return what identifies a placeholder: the name of an input or state, or the recipe of a param (how it is made).

    None for a call.
    """
    if item.op == "param":
        return "param", str(item.recipe)
    return None if item.is_call else (item.op, item.name)


def _leaves(item: Item) -> list[Hashable]:
    return [(slot, leaf) for slot, (source, _) in item.args.items() if (leaf := _leaf(source)) is not None]


def _value_key(item: Item) -> tuple[Hashable, ...]:
    turned = item.turned
    if turned is not None:
        return "param", str(turned)
    leaf = _leaf(item)
    if leaf is not None:
        return (leaf,) if item.op != "param" else ("param", str(item.recipe))
    args = ((slot, source.value, index) for slot, (source, index) in item.args.items())
    return item.op, tuple(item.attrs.items()), tuple(args)


def _full_key(item: Item) -> tuple[Hashable, ...]:
    args = tuple((slot, source.full, index) for slot, (source, index) in item.args.items())
    group = item.group.signature if item.group else -1
    salt = item.value if item.random else -1
    declared = item.type, item.placement, item.backend, group, salt
    if item.op == "state":
        spec = item.program.states[item.name]
        declared = (*declared, spec.kind, spec.group, spec.unit)  # type: ignore[assignment]
    return item.op, _leaf(item), tuple(item.attrs.items()), args, declared


def _look_down(flat: Flat, ids: Ids, name: str, key: Callable[[Item], tuple[Hashable, ...]]) -> None:
    keys = {item: ids.of("user", *key(item)) for item in flat.items if item.is_call}
    for item in reversed(flat.items):
        uses = [ids.of(keys[user], slot, index, getattr(user, name)) for user, slot, index in item.users]
        uses += [ids.of("output", output, index) for output, index in item.outputs]
        setattr(item, name, ids.of("uses", *sorted(uses)))
