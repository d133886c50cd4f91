"""Planted faults are where their truth says, show, obey fuel, come again by their seed, and leave nothing behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn, drawn_in_one_of, in_one_of
from planted import in_passes
from planted.catalogue import SOURCES, compile_healthy, draw_fault
from planted.fault import Fault, Setup, Truth
from planted.in_kernels import KERNELS
from planted.observe import Seen, serve, visible
from planted.where import Place
from run_seed import again, run_seed

from ingot.ir.ops import OPS
from ingot.ir.text import print_program
from ingot.passes import manager
from ingot.passes.manager import run_pass

pytestmark = pytest.mark.xdist_group("planted faults")

_QUICK = ("recipe", "plan")
_PASSES = ("insert-paged-kv", "merge-linears", "fuse-add-rms-norm", "normalize", "choose-layouts", "cse")


def _drawn(source: str, number: int, folder: Path) -> Any:
    """`draw_fault` compares the faulty compile with a healthy one, and fails where the truth does not hold."""
    return draw_fault(f"{run_seed()} {source} {number}", folder, {source: SOURCES[source]})


# A fault of the CPU's kernels compiles their library twice: half a minute.
@pytest.mark.parametrize("source", [*drawn(1, _QUICK), *drawn_in_one_of(6, ["cpu"])])
def test_a_fault_is_where_its_truth_says_and_shows(source: str, tmp_path: Path) -> None:
    planted = _drawn(source, 0, tmp_path)
    assert planted.shows and planted.fault.truth.nodes, again(planted.fault)


@pytest.mark.slow
@pytest.mark.parametrize("source", [name for name, source in SOURCES.items() if not source.slow])
def test_faults_of_every_source(source: str, tmp_path: Path) -> None:
    for number in range(3):
        assert _drawn(source, number + 1, tmp_path).shows


@pytest.mark.parametrize("source", drawn_in_one_of(2, _PASSES))
def test_a_pass_spoils_nothing_with_the_fuel_that_ends_before_its_rewrite(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = _drawn(source, 0, tmp_path)
    fault: Fault = planted.fault
    calls: list[tuple[Any, ...]] = []

    def watched(one: Any, program: Any, context: Any, *, under: Any, reached: bool = False, fuel: Any = None) -> Any:
        if (one.name, context.bucket and context.bucket.name) == (fault.truth.blamed, fault.truth.bucket):
            calls.append((one, program, context, under))
        return run_pass(one, program, context, under=under, reached=reached, fuel=fuel)

    with monkeypatch.context() as patch, fault.plant():
        patch.setattr(manager, "run_pass", watched)
        fault.setup.compile(planted.checkpoint, tmp_path / "again.ingot")
    anchor = str(fault.truth.rewrite)
    for one, program, context, under in calls:  # a pass may run several times
        # A fault changes a rewrite, and may end later ones. Or it adds one: a healthy choose-layouts may have none.
        healthy = run_pass(one, program, context, under=under)[1].rewrites
        with fault.plant():
            faulty = run_pass(one, program, context, under=under)[1].rewrites
        if anchor in (anchors := [rewrite.anchor for rewrite in healthy or faulty]):
            break
    index = anchors.index(anchor)
    for fuel, differs in ((index, False), (index + 1, True)):
        right, _ = run_pass(one, program, context, under=under, fuel=fuel)
        with fault.plant():
            wrong, _ = run_pass(one, program, context, under=under, fuel=fuel)
        assert (print_program(right) != print_program(wrong)) == differs, again(fault)


@pytest.mark.slow
def test_a_seed_gives_the_same_fault_again(tmp_path: Path) -> None:
    first, second = (_drawn("merge-linears", 1, tmp_path) for _ in range(2))
    assert first.fault.to_json() == second.fault.to_json()


@in_one_of(3)
def test_nothing_of_a_plant_is_left(tmp_path: Path) -> None:
    planted = _drawn("insert-paged-kv", 2, tmp_path)
    setup = planted.fault.setup
    healthy, faulty = compile_healthy(setup, tmp_path), serve(planted.artifact)
    assert visible(healthy.seen, faulty, str(setup.options["dtype"]))
    assert visible(healthy.seen, serve(healthy.artifact), str(setup.options["dtype"])) is None


def test_a_truth_fits_where_the_fault_shows_first_and_nowhere_else() -> None:
    same = Place(traced=False, pass_name=None, bucket=None, weights=frozenset(), plan=False)
    places = {
        "definition": replace(same, traced=True),
        "pass": replace(same, pass_name="cse"),
        "recipe": replace(same, weights=frozenset({"w"})),
        "plan": replace(same, plan=True),
        "backend": same,
    }
    for kind in places:
        truth = Truth(kind, "cse" if kind == "pass" else "", "", ("w",))
        assert [name for name, place in places.items() if place.fits(truth)] == [kind]
    assert not places["recipe"].fits(Truth("recipe", "concat", "", ("v",)))


def test_rounding_is_no_fault() -> None:
    logits = torch.randn(5, 7)
    seen = Seen([logits], [torch.arange(3)])
    assert visible(seen, Seen([logits * (1 + 1e-6)], [torch.arange(3)]), "float32") is None
    assert visible(seen, Seen([logits * 1.1], [torch.arange(3)]), "float32")
    assert visible(seen, Seen([logits], [torch.arange(3) + 1]), "float32")


def test_a_verdict_is_judged_by_all_that_the_truth_says() -> None:
    truth = Truth("pass", "cse", "", ("add_1",), rewrite="add")
    right = {"kind": "pass", "blamed": "cse", "rewrite": {"anchor": "add"}, "node": "add_1"}
    assert truth.judge(right).exact
    for wrong in ({"kind": "plan"}, {"blamed": "normalize"}, {"rewrite": None}, {"node": "add"}):
        assert not truth.judge({**right, **wrong}).exact
    assert not truth.judge({"kind": "healthy"}).blamed


def test_kernels_are_those_of_known_ops() -> None:
    assert KERNELS.keys() <= OPS.keys()
    assert in_passes.PASSES.keys() >= set(_PASSES)
    assert isinstance(SOURCES["cpu"].options[0], dict) and Setup("llama").options == {}
