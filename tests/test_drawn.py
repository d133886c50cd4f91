"""The markers `one_in` and `one_in_file`: a run takes a part of the cases, and a row of commits takes all."""

from collections.abc import Sequence

import drawn
import pytest


class Case:
    """A case of a test, as far as drawing looks at it. It has the markers that `parts` names."""

    def __init__(self, nodeid: str = "", **parts: int) -> None:
        self.nodeid, self.parts = nodeid, parts

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        if name not in self.parts:
            return None
        mark: pytest.Mark = getattr(pytest.mark, name)(self.parts[name]).mark
        return mark


def taken(
    monkeypatch: pytest.MonkeyPatch, seed: int, tests: Sequence[list[Case]], marker: str = "one_in"
) -> list[list[int]]:
    monkeypatch.setattr(drawn, "run_seed", lambda: str(seed))
    out = drawn.left_out({f"test_{nth}": cases for nth, cases in enumerate(tests)}, marker)  # type: ignore[misc]
    return [[place for place, case in enumerate(cases) if case not in out] for cases in tests]


@pytest.mark.parametrize(("cases", "parts", "count"), [(9, 4, 3), (8, 4, 2), (3, 4, 1), (1, 4, 1), (5, 1, 5)])
def test_a_part_of_the_cases_is_taken(cases: int, parts: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [taken(monkeypatch, seed, [[Case(one_in=parts) for _ in range(cases)]])[0] for seed in range(100)]
    assert {len(places) for places in found} == {count}
    assert {place for places in found for place in places} == set(range(cases))


def test_tests_of_as_many_cases_have_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = taken(monkeypatch, 7, [[Case(one_in=3) for _ in range(count)] for count in (12, 12, 24)])
    assert first == second and len(first) == 4 and len(other) == 8


def test_each_file_is_drawn_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [[Case(one_in_file=3) for _ in range(12)] for _ in range(3)]
    found = [taken(monkeypatch, seed, files, "one_in_file") for seed in range(100)]
    assert all(len(places) == 4 for run in found for places in run)
    assert sum(run[0] == run[1] for run in found) < 10
    assert {place for run in found for place in run[2]} == set(range(12))


def test_a_run_of_the_suite_draws_tests_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is all that comes before "[", and a file what comes before "::". A test with both markers keeps a case."""
    monkeypatch.setattr(drawn, "run_seed", lambda: "1")
    tests = [Case(f"a.py::test_{name}[{nth}]", one_in=4) for name in "xy" for nth in range(8)]
    files = [Case(f"{name}.py::test_{nth}", one_in_file=3) for name in "bc" for nth in range(9)]
    both = [Case(f"b.py::test_both[{nth}]", one_in=8, one_in_file=3) for nth in range(8)]
    plain = [Case(f"b.py::test_plain[{nth}]") for nth in range(5)]
    for by_file, count in ((True, 3), (False, 9)):
        out = drawn.drawn_out([*tests, *files, *both, *plain], files=by_file)  # type: ignore[list-item]
        kept = [[one for one in cases if one not in out] for cases in (tests[:8], tests[8:], both, plain)]
        assert [len(one) for one in kept] == [2, 2, 1, 5]
        assert [len([one for one in cases if one not in out]) for cases in (files[:9], files[9:])] == [count, count]
