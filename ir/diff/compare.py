"""Compare two programs whose items (placeholders and calls) are paired, pair by pair.

The two items of a pair are compared in all declared properties and arguments. So programs without a difference here,
and without unpaired items, are the same except for names and order.
"""

import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

from ingot.ir.diff.align import Pairs
from ingot.ir.diff.difference import ABSENT, Difference
from ingot.ir.diff.flat import Flat, Item, ItemResult, placement_text
from ingot.ir.diff.follows import placement_follows, type_follows
from ingot.ir.program import Program
from ingot.ir.recipe import Recipe
from ingot.ir.text import print_call, print_placeholder, value_name

Follows = Callable[[Item], bool] | None
Differ = Callable[[ItemResult | None, ItemResult | None], bool]


class Comparison:
    """Compares the paired items of two programs, `one` and `other`. An item is a placeholder or call.

    A region (calls that are compiled together) counts as the calls inside it.
    """

    def __init__(self, one: Flat, other: Flat, pairs: Pairs) -> None:
        self.one, self.other, self.pairs = one, other, pairs
        self._images: dict[int, set[int]] = {}
        for item, twin in pairs.after.items():
            self._images.setdefault(item.full, set()).add(twin.full)

    def changes(self) -> Iterator[Difference]:
        """Yield the differences between the two items of each pair."""
        for item in self.one.items:
            if (twin := self.pairs.after.get(item)) is not None:
                yield from self._pair(item, twin)

    def outputs(self) -> Iterator[Difference]:
        """Yield a difference for each output that exists in both programs with different values."""
        for name, before in self.one.outputs.items():
            after = self.other.outputs.get(name)
            if after is not None and self._moved(before, after):
                texts = _output_text(self.one.program, name), _output_text(self.other.program, name)
                reported = _distinct_names(texts, before, after)
                yield Difference("output", name, name, "value", *reported, layers_of(after[0]))

    def removed(self) -> list[Difference]:
        """Return a difference for each item and output that only the first program has."""
        left = _left(self.one, self.pairs.after, self._transposed_params())
        found = [Difference(item.op, item.name, "", old=_line(item), **_place(item)) for item in left]
        lost = [(name, value) for name, value in self.one.outputs.items() if name not in self.other.outputs]
        return found + [
            Difference("output", name, "", old=_output_line(self.one.program, name), layers=layers_of(value[0]))
            for name, value in lost
        ]

    def added(self) -> list[Difference]:
        """Return a difference for each item and output that only the second program has."""
        left = _left(self.other, self.pairs.before, self._transposed_params())
        found = [Difference(item.op, "", item.name, new=_line(item), **_place(item)) for item in left]
        gained = [(name, value) for name, value in self.other.outputs.items() if name not in self.one.outputs]
        return found + [
            Difference("output", "", name, new=_output_line(self.other.program, name), layers=layers_of(value[0]))
            for name, value in gained
        ]

    def _pair(self, item: Item, twin: Item) -> Iterator[Difference]:
        if item.is_call != twin.is_call:
            yield _layout_change(item, twin)
            return
        rewired: list[Difference] = []
        if item.op != twin.op:
            yield _change(item, twin, "op", _op_text(item), _op_text(twin))
        elif item.is_call:
            reported = [*self._attributes(item, twin), *self._arguments(item, twin, self._moved)]
            rewired = self._rewired(item, twin, reported)
            yield from (*reported, *rewired)
        for field, old, new, follows in _declared(item, twin):
            plain = field == "type" and rewired  # the printed line does not show it
            if old != new and (plain or not (follows and follows(item) and follows(twin))):
                yield _change(item, twin, field, old, new)

    def _rewired(self, item: Item, twin: Item, reported: list[Difference]) -> list[Difference]:
        """Return the arguments in which two paired calls differ, besides the differences in `reported`.

        If `reported` is empty, nothing is returned: a call has not changed if it only reads an inserted value.
        """
        slots = {one.field for one in reported}
        others = self._arguments(item, twin, self._is_other) if reported else ()
        return [one for one in others if one.field not in slots and one.old != one.new]

    def _attributes(self, item: Item, twin: Item) -> Iterator[Difference]:
        for name in dict.fromkeys([*item.attrs, *twin.attrs]):
            old, new = item.attrs.get(name, ABSENT), twin.attrs.get(name, ABSENT)
            slots = [{slot for slot in one.args if slot.partition("[")[0] == name} for one in (item, twin)]
            if old != new and slots[0] == slots[1]:
                yield _change(item, twin, name, old, new)

    def _arguments(self, item: Item, twin: Item, differ: Differ) -> Iterator[Difference]:
        for slot in dict.fromkeys([*item.args, *twin.args]):
            before, after = item.args.get(slot), twin.args.get(slot)
            if differ(before, after):
                texts = item.reads.get(slot, ABSENT), twin.reads.get(slot, ABSENT)
                yield _change(item, twin, slot, *_distinct_names(texts, before, after))

    def _is_other(self, before: ItemResult | None, after: ItemResult | None) -> bool:
        """Return whether two arguments are different values.

        They count as different even if the diff lists the cause elsewhere, as an added or removed item.
        """
        if before is None or after is None:
            return before is not after
        (source, index), (twin, place) = before, after
        image = self.pairs.after.get(source)
        known = {source.full, *self._images.get(source.full, ())}
        return index != place or (image is not twin and twin.full not in known)

    def _moved(self, before: ItemResult | None, after: ItemResult | None) -> bool:
        """Return whether two arguments are different values and the diff does not list the cause elsewhere.

        False if only added or removed items between the two values make the difference, because the diff lists these.
        """
        if before is None or after is None:
            return before is not after
        (source, index), (twin, place) = before, after
        image, original = self.pairs.after.get(source), self.pairs.before.get(twin)
        if image is not None:
            if image is twin or image.full == twin.full:
                return index != place
            return original is not None or not _reaches(twin, image, self.pairs.before)
        if twin.full == source.full or twin.full in self._images.get(source.full, ()):
            return index != place
        return original is not None and not _reaches(source, original, self.pairs.after)

    def _transposed_params(self) -> set[Item]:
        """Return the params that one of the programs stores transposed, and reads through a transpose.

        The diff lists such a param as a changed layout, not as an added or removed param.
        """
        found = set()
        for item, twin in self.pairs.after.items():
            if item.is_call != twin.is_call:
                view, paired = (twin, self.pairs.before) if twin.is_call else (item, self.pairs.after)
                held = next(iter(view.args.values()))[0]
                if held not in paired and len(held.users) == 1:
                    found.add(held)
        return found


def _reaches(item: Item, target: Item, paired: dict[Item, Item]) -> bool:
    """Return whether `item` is computed from `target` with only inserted items between them.

    An inserted item exists in one of the two programs only. `paired` holds the partners of all other items.
    """
    queue, seen = [item], {item}
    while queue:
        for source, _ in queue.pop().args.values():
            if source is target:
                return True
            if source not in seen and source not in paired:
                seen.add(source)
                queue.append(source)
    return False


def _distinct_names(texts: tuple[str, str], before: ItemResult | None, after: ItemResult | None) -> tuple[str, str]:
    """Return different names for two values that differ, so that a diff can show them.

    `texts` are their names. If the names are equal, each gets its node's name in brackets.
    """
    if texts[0] != texts[1] or before is None or after is None:
        return texts
    return f"{texts[0]} (%{before[0].name})", f"{texts[1]} (%{after[0].name})"


def _declared(item: Item, twin: Item) -> Iterator[tuple[str, str, str, Follows]]:
    """Yield the properties that two paired items declare, such as type and backend: (field, old, new, follows).

    `follows` is a function. It returns whether an item's property follows from its arguments. If it does in both
    programs, a difference is only a consequence of another one, and is not listed. None: it never follows.
    """
    if item.recipe is not None and twin.recipe is not None and str(item.recipe) != str(twin.recipe):
        yield (*recipe_change(item.recipe, twin.recipe), None)
    if item.op == twin.op == "state":
        before, after = item.program.states[item.name], twin.program.states[twin.name]
        yield "kind", before.kind, after.kind, None
        yield "group", before.group, after.group, None
        yield "unit", before.unit, after.unit, None
    yield "type", item.type, twin.type, _type_follows
    if (item.group is None) == (twin.group is None):
        yield "placement", item.placement, twin.placement, _placement_follows
        yield "backend", item.own_backend, twin.own_backend, None
    else:  # the values inside a region have no placements of their own
        yield "backend", item.backend, twin.backend, None
    old, new = _alias_texts(item), _alias_texts(twin)
    for index in sorted(old.keys() & new.keys()):
        name = f"item {index}" if index >= 0 else "result"
        yield name, "; ".join(sorted(old[index])), "; ".join(sorted(new[index])), _aliases_follow


def _type_follows(item: Item) -> bool:
    return item.is_call and type_follows(item.node, item.program)


def _placement_follows(item: Item) -> bool:
    return item.is_call and placement_follows(item.node, item.program)


def _alias_texts(item: Item) -> dict[int, set[str]]:
    """Return the types and placements that other nodes declare for an item's results, by the result's index.

    These nodes are `getitem` nodes, and calls of regions that return the result. A region is a set of calls that are
    compiled together.
    """
    found: dict[int, set[str]] = {}
    for index, node, _ in item.aliases:
        words = [str(node.meta["type"]), placement_text(node.meta.get("placement", ()))]
        if node.target is operator.getitem:
            words.append(str(node.meta.get("backend", "")))
        found.setdefault(index, set()).add(" ".join(filter(None, words)))
    return found


def _aliases_follow(item: Item) -> bool:
    return all(type_follows(node, program) and placement_follows(node, program) for _, node, program in item.aliases)


def recipe_change(old: Recipe, new: Recipe) -> tuple[str, str, str]:
    """Return how two recipes of a weight differ, as (field, old text, new text).

    The texts show only the part that differs: one attribute, or the smallest step that contains all differences.
    """
    if old.step == new.step and old.output == new.output and len(old.inputs) == len(new.inputs):
        apart = [pair for pair in zip(old.inputs, new.inputs, strict=True) if str(pair[0]) != str(pair[1])]
        before, after = ({name: json.dumps(value) for name, value in one.attrs} for one in (old, new))
        names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
        if len(apart) == 1 and not names:
            return recipe_change(*apart[0])
        if not apart and len(names) == 1:
            return f"recipe {old.step} {names[0]}", before.get(names[0], ABSENT), after.get(names[0], ABSENT)
    return "recipe", str(old), str(new)


def _change(item: Item, twin: Item, field: str, old: str, new: str) -> Difference:
    return Difference(item.op, item.name, twin.name, field, old or ABSENT, new or ABSENT, **_place(twin))


def _layout_change(item: Item, twin: Item) -> Difference:
    """Return the difference for a weight that is stored row-major in one program and column-major in the other.

    The program with the column-major weight reads it through a transpose.
    """
    old, new = (f"{one.type} turned" if one.is_call else f"{one.type} as stored" for one in (item, twin))
    before, after = (one.args["x"][0].name if one.is_call else one.name for one in (item, twin))
    return Difference("param", before, after, "layout", old, new, **_place(item if twin.is_call else twin))


def _place(item: Item) -> dict[str, Any]:
    return {"layers": layers_of(item), "origin": _origin(item), "region": item.group.name if item.group else ""}


def layers_of(item: Item) -> tuple[int, ...]:
    """Return the layer of an item as a tuple with one number; empty outside layers.

    A placeholder belongs to a layer if all calls that read it do.
    """
    found = {item.layer} if item.is_call else {user.layer for user, _, _ in item.users}
    layer = found.pop() if len(found) == 1 else None
    return () if layer is None else (layer,)


def _origin(item: Item) -> str:
    return str(item.node.meta.get("origin", ""))


def _line(item: Item) -> str:
    """Return the line of a placeholder or call in its program's text, without the origin."""
    if not item.is_call:
        return print_placeholder(item.node, item.program)
    return print_call(item.node).removesuffix(f"  # {_origin(item)}")


def _left(flat: Flat, paired: dict[Item, Item], reported: set[Item]) -> list[Item]:
    return [item for item in flat.items if item not in paired and item not in reported]


def _output_text(program: Program, name: str) -> str:
    return value_name(program.output_nodes()[name])


def _output_line(program: Program, name: str) -> str:
    return f"output {name} = {_output_text(program, name)}"


def _op_text(item: Item) -> str:
    constants = ", ".join(f"{name}={text}" for name, text in item.attrs.items() if "%" not in text)
    return f"{item.op}({constants})"
