"""`bisect` names the planted fault, and finds none in a healthy artifact."""

from typing import Any

import pytest
from drawn import drawn_in_one_of
from planted.catalogue import SOURCES
from planted.trial import QUICK, in_new_process, try_fault, try_healthy
from run_seed import again, run_seed

pytestmark = pytest.mark.xdist_group("planted faults")

# What bisects quickly: one fault of each side, of which half of the commits draw one. Those that cost seconds wait for
# the slow run, and kernels have tests of their own.
_SAMPLE = ("merge-linears", "recipe")
_MORE = ("insert-paged-kv", "fuse-add-rms-norm", "cpu", "weights")
_FAULTS, _HEALTHY, _CHUNK = 200, 50, 10
# Of 200 faults this many are named to pass or backend, rewrite and node.
_EXACT = 0.95


@pytest.mark.parametrize(
    "source", [*drawn_in_one_of(2, _SAMPLE), *(pytest.param(name, marks=pytest.mark.slow) for name in _MORE)]
)
def test_a_planted_fault_is_named(source: str) -> None:
    result = try_fault(f"{run_seed()} {source}", (source,))
    assert result["score"]["blamed"], again(result)


def test_no_fault_is_found_in_a_healthy_artifact() -> None:
    result = try_healthy(run_seed(), slow=False)
    assert result["score"]["exact"], again(result)


_results: list[dict[str, Any]] = []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("chunk", range(_FAULTS // _CHUNK))
def test_faults_of_all_sorts(chunk: int) -> None:
    for number in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
        result = in_new_process("fault", f"{run_seed()}-{number}", QUICK)
        assert "no_fault" not in result, again(result)
        assert result["verdict"]["kind"] not in ("crash", "timeout"), again(result)
        _results.append(result)


@pytest.mark.slow
def test_most_faults_are_named_exactly() -> None:
    exact = [result["score"]["exact"] for result in _results]
    missed = [result for result in _results if not result["score"]["exact"]]
    assert sum(exact) >= _EXACT * len(exact), again(missed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("chunk", range(_HEALTHY // _CHUNK))
def test_no_false_culprit(chunk: int) -> None:
    for number in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
        result = in_new_process("healthy", f"{run_seed()}-{number}", tuple(SOURCES))
        assert result["score"]["exact"], again(result)
