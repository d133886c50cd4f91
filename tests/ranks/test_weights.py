"""A rank maps its own part of the weights: the parts are disjoint but for what is replicated, and make the whole."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drawn import drawn

from ingot.ir.artifact.plan import PlanFile
from ingot.ir.mesh import parse_mesh, ranks
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.weights import Place, files_of, weight_places

pytestmark = pytest.mark.xdist_group("ranks")


def places_of(folder: Path, mesh: str) -> list[dict[str, Place]]:
    """The place of each weight that each rank maps."""
    artifact = open_artifact(folder)
    file = PlanFile.model_validate_json((folder / "plan.json").read_text())
    found = []
    for rank in ranks(parse_mesh(mesh)):
        names = {name for plan in file.of(rank.index).plans.values() for name in plan.params}
        found.append({name: place for name, place in weight_places(artifact, rank).items() if name in names})
    return found


@pytest.mark.parametrize("model", drawn(1, ["llama", "gemma3", "qwen3_moe", "deepseek_v2", "qwen3-int8"]))
def test_ranks_share_only_what_is_replicated(model: str, artifact: Callable[[str, str], Path]) -> None:
    folder = artifact(model, "pp=2 tp=2")
    index = json.loads((folder / "weights.json").read_text())
    each = places_of(folder, "pp=2 tp=2")
    assert set().union(*each) == index.keys(), "the ranks have all weights together"
    stages = [set(each[0]), set(each[2])]
    assert set(each[1]) == stages[0] and set(each[3]) == stages[1]
    for name in stages[0] & stages[1]:
        # A tied embedding is read first and last; tables of positions are read in every layer.
        assert name == "embed.weight" or "rope" in name or "source" not in index[name]["recipe"], name
    for name in stages[0] | stages[1]:
        holders = [one[name] for one in each if name in one]
        entry = index[name] if "same_as" not in index[name] else index[index[name]["same_as"]]
        assert len(set(holders)) == (2 if "parts" in entry else 1), "the ranks of a stage hold other parts, or the same"
    used = {place for one in each for place in one.values()}
    whole = sum(entry.size for entry in open_artifact(folder).manifest.files if entry.path.startswith("weights/"))
    assert whole * 0.8 < sum(place.nbytes for place in used) <= whole, "all but the headers of the files"


def test_a_rank_reads_the_files_of_its_stage(artifact: Callable[[str, str], Path]) -> None:
    folder = artifact("llama", "pp=2 tp=2")
    for rank, places in zip(ranks(parse_mesh("pp=2 tp=2")), places_of(folder, "pp=2 tp=2"), strict=True):
        files = set(files_of(open_artifact(folder), places, rank))
        stage, part = divmod(rank.index, 2)
        own = {f"weights/stage{stage}/00000.safetensors", f"weights/stage{stage}/rank{part}/00000.safetensors"}
        assert files == {"weights/00000.safetensors", *own}
