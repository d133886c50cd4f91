"""Plans by position on a mesh: each rank gets those of its position, or an error that names the rank."""

from __future__ import annotations

import pytest

from ingot.ir.artifact.plan import ALL, Plan, PlanFile, Plans, ResidentMemory
from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import ONE_DEVICE, ranks
from ingot.runtime.loading.check_plan import check_positions

NO_MEMORY = ResidentMemory(weights=0, states=0, inputs=0, outputs=0)
TP4 = {"tp": 4}


def plans(entry: str) -> Plans:
    one = Plan(
        entry=entry,
        ending="sample",
        dims={},
        inputs={},
        params={},
        states={},
        outputs={},
        executables={},
        memory=NO_MEMORY,
        buckets=(),
    )
    return Plans(plans={entry: one}, round=(entry,))


def two_stages() -> PlanFile:
    """Four ranks in two stages of two."""
    return PlanFile(
        positions={"first": plans("lower"), "last": plans("upper")}, ranks=("first", "first", "last", "last")
    )


def test_each_rank_runs_the_plans_of_its_position() -> None:
    file = PlanFile.model_validate_json(two_stages().model_dump_json())
    assert file == two_stages()
    check_positions(file, TP4)
    assert [file.of(rank.index).round for rank in ranks(TP4)] == [("lower",), ("lower",), ("upper",), ("upper",)]


def test_ranks_that_run_the_same_share_a_position() -> None:
    for mesh in (ONE_DEVICE, TP4):
        file = PlanFile.alike(plans("main"), mesh)
        check_positions(file, mesh)
        assert file.positions.keys() == {ALL}
        assert [file.of(rank.index) for rank in ranks(mesh)] == [plans("main")] * len(ranks(mesh))


def test_a_rank_without_plans_is_named() -> None:
    with pytest.raises(ArtifactError, match="no plans for rank 4: it has no position") as caught:
        two_stages().of(4)
    assert "plan.json" in str(caught.value) and "first, last" in str(caught.value)
    missing = two_stages().model_copy(update={"positions": {"first": plans("lower")}})
    assert missing.of(1) == plans("lower")
    with pytest.raises(ArtifactError, match="no plans for rank 2: its position 'last' has none"):
        missing.of(2)
    with pytest.raises(ArtifactError, match="rank 2"):
        check_positions(missing, TP4)


def test_positions_are_those_of_the_mesh() -> None:
    with pytest.raises(ArtifactError, match="positions for 4 ranks") as caught:
        check_positions(two_stages(), {"tp": 2})
    assert "2 on the mesh tp=2" in str(caught.value)
    unused = two_stages().model_copy(update={"ranks": ("first",)})
    with pytest.raises(ArtifactError, match="no rank has the position 'last'"):
        check_positions(unused, ONE_DEVICE)
