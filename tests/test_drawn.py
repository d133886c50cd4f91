"""The markers `one_in` and `one_in_file`: a run takes a part of the cases, and a row of commits takes all."""

from collections.abc import Sequence

import drawn
import pytest


class Case:
    """A case of a test, as far as drawing looks at it."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def get_closest_marker(self, name: str) -> pytest.Mark:
        mark: pytest.Mark = getattr(pytest.mark, name)(self.parts).mark
        return mark


def taken(
    monkeypatch: pytest.MonkeyPatch, seed: int, tests: Sequence[list[Case]], marker: str = "one_in"
) -> list[list[int]]:
    monkeypatch.setattr(drawn, "run_seed", lambda: str(seed))
    out = drawn.left_out({f"test_{nth}": cases for nth, cases in enumerate(tests)}, marker)  # type: ignore[misc]
    return [[place for place, case in enumerate(cases) if case not in out] for cases in tests]


@pytest.mark.parametrize(("cases", "parts", "count"), [(9, 4, 3), (8, 4, 2), (3, 4, 1), (1, 4, 1), (5, 1, 5)])
def test_a_part_of_the_cases_is_taken(cases: int, parts: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [taken(monkeypatch, seed, [[Case(parts) for _ in range(cases)]])[0] for seed in range(100)]
    assert {len(places) for places in found} == {count}
    assert {place for places in found for place in places} == set(range(cases))


def test_tests_of_as_many_cases_have_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = taken(monkeypatch, 7, [[Case(3) for _ in range(count)] for count in (12, 12, 24)])
    assert first == second and len(first) == 4 and len(other) == 8


def test_each_file_is_drawn_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [[Case(3) for _ in range(12)] for _ in range(3)]
    found = [taken(monkeypatch, seed, files, "one_in_file") for seed in range(100)]
    assert all(len(places) == 4 for run in found for places in run)
    assert sum(run[0] == run[1] for run in found) < 10
    assert {place for run in found for place in run[2]} == set(range(12))
