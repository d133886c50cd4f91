"""What each replica runs on: a GPU of its own, or a share of the cores."""

from __future__ import annotations

import pytest

from ingot.ir.errors import OptionError
from ingot.serve.engine import place
from ingot.serve.engine.place import core_places, find_places, gpu_places, visible_gpus


def test_cores_are_divided() -> None:
    for replicas in range(1, 9):
        places = core_places(replicas, range(8, 16), 840)
        shares = [one.cores or () for one in places]
        assert sorted(core for share in shares for core in share) == [*range(8, 16)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert [one.variables for one in places] == [{"OMP_NUM_THREADS": str(len(share))} for share in shares]
        assert {one.memory for one in places} == {840 // replicas}
    assert core_places(2, [0, 1, 2], 2)[1].arguments == ["1,2"]


def test_memory_is_divided_unless_it_is_given() -> None:
    place, gpu = core_places(2, [0, 1], 100)[0], gpu_places(1, ["0"])[0]
    assert place.options({"seed": 1, "memory": None}) == {"seed": 1, "memory": 50}
    for given in ({"memory": 70}, {"num_kv_pages": 9}):
        assert place.options(given) == given
    assert gpu.options({"seed": 1}) == {"seed": 1}


@pytest.mark.parametrize(
    ("count", "variable", "names"),
    [
        (2, None, ["0", "1"]),
        (2, "3,5", ["3", "5"]),
        (1, "0,9", ["0"]),  # the driver ignores the second one, which is not there
        (2, " GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
        (0, "", []),
    ],
)
def test_the_gpus_that_are_visible(count: int, variable: str | None, names: list[str]) -> None:
    assert visible_gpus(count, variable) == names


def test_each_replica_has_one_gpu() -> None:
    assert [one.variables["CUDA_VISIBLE_DEVICES"] for one in gpu_places(2, ["4", "7", "8"])] == ["4", "7"]


def test_each_replica_of_a_mesh_has_a_gpu_for_each_rank() -> None:
    places = gpu_places(2, ["4", "7", "8", "9", "1"], ranks=2)
    assert [(one.name, one.variables["CUDA_VISIBLE_DEVICES"]) for one in places] == [
        ("gpu 4 7", "4,7"),
        ("gpu 8 9", "8,9"),
    ]
    with pytest.raises(OptionError, match="--replicas is 3, and this process can use 5 GPUs with 2 for each"):
        gpu_places(3, ["4", "7", "8", "9", "1"], ranks=2)


def test_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_count_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(OptionError, match="--replicas is 2, and this process can use 1 GPUs"):
        find_places(2, "cuda")
    with pytest.raises(OptionError, match="can use 2 cores"):
        core_places(3, [0, 1], 100)


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(place.ctypes, "CDLL", missing)
    with pytest.raises(OptionError, match="0 GPUs"):
        find_places(2, "cuda")
