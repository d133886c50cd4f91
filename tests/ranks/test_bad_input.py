"""Meshes that cannot be, and artifacts of another mesh: each is refused in words that say what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, compile_model
from ingot.cli.views.filter import Filter
from ingot.cli.views.plan import plan_json
from ingot.ir.errors import OptionError
from ingot.ir.mesh import check_mesh, parse_mesh, ranks
from ingot.runtime.loading.artifact import open_artifact
from ingot.serve.mesh_sizes import with_mesh

pytestmark = pytest.mark.xdist_group("ranks")


def test_axes_have_one_order() -> None:
    assert (
        list(parse_mesh("tp=2 pp=3").items()) == [("pp", 3), ("tp", 2)] == list(check_mesh({"pp": 3, "tp": 2}).items())
    )
    assert [(rank.stage, rank.part) for rank in ranks(parse_mesh("tp=2,pp=2"))] == [
        (0, (0, 2)),
        (0, (1, 2)),
        (1, (0, 2)),
        (1, (1, 2)),
    ]


@pytest.mark.parametrize(
    ("model", "mesh", "what", "expected"),
    [
        ("llama", {"pp": 4}, "pp=4 for a model of 3 layers", "pp of at most 3"),
        ("llama", {"tp": 4}, r"has 6 parts of 14, which do not divide among 4 ranks", "tp of 1, 2, 3, 6, its divisors"),
        ("qwen3_moe", {"tp": 4}, r"which do not divide among 4 ranks", "its divisors"),
        ("llama", {"ep": 2}, "unknown mesh axis 'ep'", "pp, tp"),
        ("llama", {"tp": 2048}, "a mesh of 2048 ranks", "at most 1024"),
    ],
)
def test_meshes_that_cannot_be(
    model: str, mesh: dict[str, int], what: str, expected: str, artifact: Callable[[str, str], Path], tmp_path: Path
) -> None:
    checkpoint = artifact(model, "").parent / model
    with pytest.raises(OptionError, match=what) as caught:
        compile_model(checkpoint, tmp_path / "no.ingot", mesh=mesh, backend="reference", max_seq_len=64)
    assert expected in caught.value.expected
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.parametrize(
    ("sizes", "what", "hint"),
    [
        (
            {"tensor_parallel_size": 4},
            "tensor_parallel_size is 4, and the artifact was compiled for tp=2",
            '--mesh "tp=4"',
        ),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3", '--mesh "pp=3 tp=2"'),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size is 1", "NAME.ingot"),
    ],
)
def test_an_artifact_of_another_mesh(
    sizes: dict[str, int], what: str, hint: str, artifact: Callable[[str, str], Path]
) -> None:
    with pytest.raises(OptionError, match=what) as caught:
        LLM(artifact("llama", "tp=2"), **sizes)  # type: ignore[arg-type]
    assert hint in caught.value.hint


def test_a_filter_for_the_instructions_of_stages(artifact: Callable[[str, str], Path]) -> None:
    """A stage has some of the program's calls, so they do not pair with instructions by their places."""
    made = open_artifact(artifact("llama", "pp=2"))
    with pytest.raises(OptionError, match="pipeline stages") as caught:
        plan_json(made, Filter(op="linear"))
    assert "--program" in caught.value.hint
    assert len(plan_json(made, Filter())["positions"]) == 2


def test_the_vllm_interface_takes_the_sizes(artifact: Callable[[str, str], Path]) -> None:
    from ingot.vllm_api import LLM as Other

    with pytest.raises(OptionError, match="tensor_parallel_size is 4, and the artifact was compiled for tp=2"):
        Other(str(artifact("llama", "tp=2")), tensor_parallel_size=4)


def test_sizes_become_a_mesh(artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    checkpoint, made = "org/name", artifact("llama", "tp=2")
    assert with_mesh(checkpoint, {"tensor_parallel_size": 2, "dtype": "auto"}) == {"dtype": "auto", "mesh": {"tp": 2}}
    assert with_mesh(checkpoint, {"tensor_parallel_size": 1, "pipeline_parallel_size": None}) == {}
    assert with_mesh(made, {"tensor_parallel_size": 2}) == {} == with_mesh(made, {"pipeline_parallel_size": 1})
    for bad in (0, -1, True, "2", 1.5):
        with pytest.raises(OptionError, match="tensor_parallel_size is"):
            with_mesh(checkpoint, {"tensor_parallel_size": bad})
    with pytest.raises(OptionError, match="tensor_parallel_size and a mesh"):
        with_mesh(checkpoint, {"tensor_parallel_size": 2, "mesh": {"tp": 2}})


def test_a_damaged_stage_is_refused(artifact: Callable[[str, str], Path]) -> None:
    """A transfer that names no value, or the stage itself, is an error of the file and not of a running step."""
    from ingot.ir.artifact.plan import PlanFile
    from ingot.ir.errors import ArtifactError
    from ingot.runtime.loading.check_plan import check_plans

    text = json.loads((artifact("llama", "pp=2") / "plan.json").read_text())

    def check(change: Callable[[Any], None]) -> None:
        changed = json.loads(json.dumps(text))
        change(changed["positions"]["stage 1"]["plans"]["main"]["buckets"][0])
        check_plans(PlanFile.model_validate_json(json.dumps(changed)).of(1))

    def set_received(bucket: Any, **values: Any) -> None:
        bucket["transfers"]["received"][0].update(values)

    check(lambda bucket: None)
    for values in ({"name": "nothing"}, {"stage": 1}, {"stage": 2}):
        with pytest.raises(ArtifactError, match="is shared with stage"):
            check(lambda bucket, values=values: set_received(bucket, **values))  # type: ignore[misc]
    with pytest.raises(ArtifactError, match="is received"):
        check(lambda bucket: bucket["transfers"].update(received=[]))
