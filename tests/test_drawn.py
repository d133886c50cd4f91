"""The marker `one_in`: a run takes a part of a test's cases, and a row of commits takes all."""

from collections.abc import Sequence

import drawn
import pytest


class Case:
    """A case of a test, as far as drawing looks at it."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def get_closest_marker(self, name: str) -> pytest.Mark:
        assert name == "one_in"
        return pytest.mark.one_in(self.parts).mark


def taken(monkeypatch: pytest.MonkeyPatch, seed: int, tests: Sequence[list[Case]]) -> list[list[int]]:
    monkeypatch.setattr(drawn, "run_seed", lambda: str(seed))
    out = drawn.left_out(tests)  # type: ignore[arg-type]
    return [[place for place, case in enumerate(cases) if case not in out] for cases in tests]


@pytest.mark.parametrize(("cases", "parts", "count"), [(9, 4, 3), (8, 4, 2), (3, 4, 1), (1, 4, 1), (5, 1, 5)])
def test_a_part_of_the_cases_is_taken(cases: int, parts: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [taken(monkeypatch, seed, [[Case(parts) for _ in range(cases)]])[0] for seed in range(100)]
    assert {len(places) for places in found} == {count}
    assert {place for places in found for place in places} == set(range(cases))


def test_tests_of_as_many_cases_have_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = taken(monkeypatch, 7, [[Case(3) for _ in range(count)] for count in (12, 12, 24)])
    assert first == second and len(first) == 4 and len(other) == 8
