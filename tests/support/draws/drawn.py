"""Cases of which a run takes some: the commit draws them, and --run-slow takes all.

Draws of commits are independent: of cases drawn by thirds, 2 % have not run after ten commits. Cases in turn, by the
number of commits, would always be the same ones if every third commit is tested.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from run_seed import run_seed

Test = TypeVar("Test", bound=Callable[..., Any])


def in_one_of(runs: int) -> Callable[[Test], Test]:
    """Decorates a test that takes ten seconds or more: it runs in one of so many runs, and is slow in the others. Each
    test is drawn by its name."""

    def mark(test: Test) -> Test:
        takes = random.Random(f"{run_seed()} {test.__name__} in one of {runs} runs").randrange(runs) == 0
        return test if takes else pytest.mark.slow(test)

    return mark


def left_out(units: Mapping[str, Sequence[pytest.Item]], marker: str) -> set[pytest.Item]:
    """What a run leaves out of `units`: the cases of each test with the marker `one_in`, or of each file with
    `one_in_file`. It takes the part that the marker says, and one case at least. Tests of as many cases have the same
    ones drawn: they may share what these make. Each file is drawn by its name.
    """
    out: set[pytest.Item] = set()
    for unit, cases in units.items():
        mark = cases[0].get_closest_marker(marker)
        assert mark is not None
        count = -(-len(cases) // mark.args[0])
        what = f"{count} of {len(cases)}" if marker == "one_in" else unit
        taken = random.Random(f"{run_seed()} {what}").sample(range(len(cases)), count)
        out |= {case for place, case in enumerate(cases) if place not in taken}
    return out


def drawn_out(items: Iterable[pytest.Item], *, files: bool) -> set[pytest.Item]:
    """What a run leaves out of `items` by `one_in`, and with `files` by `one_in_file`. A test with both has the first
    one only: it takes one case at least.
    """
    cases, of_files = defaultdict[str, list[pytest.Item]](list), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("one_in"):
            cases[item.nodeid.partition("[")[0]].append(item)
        elif files and item.get_closest_marker("one_in_file"):
            of_files[item.nodeid.partition("::")[0]].append(item)
    return left_out(cases, "one_in") | left_out(of_files, "one_in_file")


def drawn_in_one_of(runs: int, cases: Iterable[Any]) -> list[Any]:
    """As `drawn`: one of `cases` in one of so many runs, none in the others. For what takes tens of seconds."""
    all_cases = list(cases)
    takes = random.Random(f"{run_seed()} one of {runs} runs, {len(all_cases)}").randrange(runs) == 0
    return drawn(int(takes), all_cases)


def drawn(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters for pytest: `cases`, tuples where a test has several names, all but `count` of them marked slow."""
    all_cases = list(cases)
    taken = random.Random(f"{run_seed()} {count} of {len(all_cases)}").sample(range(len(all_cases)), count)
    return [
        case
        if place in taken
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for place, case in enumerate(all_cases)
    ]
