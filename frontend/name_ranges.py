"""Join lines about tensors whose names differ only in numbers, such as those of experts: one line for a whole range."""

import re
from collections.abc import Iterable, Iterator, Sequence

# A part of a tensor's name that is a number, such as the index of a layer or of an expert.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Values = tuple[int, ...]


def joined(lines: Sequence[str]) -> list[str]:
    """Return lines that begin with tensor names, with one line for all that differ only in numbers within the name.

    Example: "layers.0.w [4]", "layers.1.w [4]" and "layers.3.w [4]" become "layers.{0-1,3}.w [4]". Lines with equal
    text around the numbers are joined if their numbers are all combinations of the ranges that the new line shows.
    Other lines keep their text. The order is that of the first line of each group.
    """
    groups: dict[tuple[str, ...], set[Values]] = {}
    for line in lines:
        name, space, rest = line.partition(" ")
        around = _NUMBER.split(name)
        key = (*around[:-1], around[-1] + space + rest)
        groups.setdefault(key, set()).add(tuple(map(int, _NUMBER.findall(name))))
    return [_text(around, box) for around, found in groups.items() for box in _boxes(found)]


def _boxes(found: set[Values]) -> Iterator[tuple[Values, ...]]:
    """Yield sets of combinations that together are exactly the tuples `found`, in ascending order.

    A set is given as the values of each position: it holds all their combinations.
    """
    if found == {()}:
        yield ()
        return
    rest: dict[int, set[Values]] = {}
    for first, *others in sorted(found):
        rest.setdefault(first, set()).add(tuple(others))
    alike: dict[frozenset[Values], list[int]] = {}
    for first, values in rest.items():
        alike.setdefault(frozenset(values), []).append(first)
    for others_of, firsts in alike.items():
        for box in _boxes(set(others_of)):
            yield (tuple(firsts), *box)


def _text(around: tuple[str, ...], box: tuple[Values, ...]) -> str:
    numbers = [str(values[0]) if len(values) == 1 else f"{{{_ranges(values)}}}" for values in box]
    return around[0] + "".join(number + text for number, text in zip(numbers, around[1:], strict=True))


def _ranges(values: Iterable[int]) -> str:
    """Return ascending numbers as text: "0-3,7" for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return ",".join("-".join(map(str, run)) for run in runs)
