"""An artifact for a mesh: each rank's weights lie by themselves, a rank loads its own."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sharded import CASES

from ingot import compile_model
from ingot.compile.packing import Wanted, pack_weights
from ingot.compile.publish import ArtifactWriter
from ingot.debug.explain import explain
from ingot.debug.requested_step import RequestedStep
from ingot.debug.verification import Promise
from ingot.debug.verify import verify
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.artifact.plan import PlanFile
from ingot.ir.errors import ArtifactError, IngotError, OptionError, TargetError
from ingot.ir.mesh import Rank, ranks
from ingot.ir.numerics.harness import InterpreterRun, MeshRun, load_params, teacher_forced
from ingot.ir.parse import parse_program
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import source
from ingot.ir.types import DTYPES, Placement, TensorType
from ingot.runtime.loading import weights as weights_module
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.check_plan import check_positions
from ingot.runtime.loading.load_context import mesh_of
from ingot.runtime.loading.loader import bind
from ingot.runtime.loading.weights import map_weights

pytestmark = pytest.mark.xdist_group("mesh artifact")
MESH = {"tp": 2}
CASE = CASES["key-value groups"]
LIMITS = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 64, "backend": "reference", "jobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and its artifact for two ranks."""
    from tiny import TINY

    made = tmp_path_factory.mktemp("mesh")
    TINY[CASE.checkpoint].write(made / "checkpoint", **CASE.changes)
    compile_model(made / "checkpoint", made / "two.ingot", mesh=MESH, **LIMITS)  # type: ignore[arg-type]
    return made


def weights(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "two.ingot" / "weights.json").read_text())
    return index


def whole_weights(folder: Path, name: str) -> torch.Tensor:
    """A weight as one device has it: concatenated in the checkpoint's own names, written down apart from recipes."""
    parts = {
        "q_k_v": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "o": ["self_attn.o_proj"],
        "down": ["mlp.down_proj"],
    }
    with safe_open(folder / "checkpoint" / "model.safetensors", "pt") as stored:
        if not name.startswith("layers."):
            return stored.get_tensor(
                {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}[name]
            )
        _, layer, _, linear, kind = name.split(".")
        return torch.cat([stored.get_tensor(f"model.layers.{layer}.{part}.{kind}") for part in parts[linear]])


def test_a_rank_loads_its_slices(folder: Path) -> None:
    artifact = open_artifact(folder / "two.ingot")
    loaded = [map_weights(artifact, rank) for rank in ranks(MESH)]
    split = {name: entry for name, entry in weights(folder).items() if "parts" in entry}
    assert {name.split(".")[-2] for name in split} == {"q_k_v", "gate_up", "o", "down", "embed", "head"}
    for name, entry in split.items():
        whole = whole_weights(folder, name)
        dim = 1 if name.split(".")[-2] in ("o", "down") else 0
        sizes = {"q_k_v": [84, 28, 28], "gate_up": [100, 100]}.get(name.split(".")[-2], [whole.shape[dim]])
        pieces = [piece.chunk(2, dim) for piece in whole.split(sizes, dim)]
        for rank in (0, 1):
            expected = torch.cat([piece[rank] for piece in pieces], dim)
            assert torch.equal(loaded[rank][name], expected) and list(expected.shape) == entry["shape"], name
    for name in weights(folder).keys() - split.keys():
        assert torch.equal(loaded[0][name], loaded[1][name])


def test_the_bytes_of_a_rank_are_its_own(folder: Path) -> None:
    """The ranges of all weights, by file: none overlap, and a rank's files hold its parts alone."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    owner: dict[str, set[int | None]] = {}
    for entry in weights(folder).values():
        size = DTYPES[entry["dtype"]].itemsize
        for extent in entry["shape"]:
            size *= extent
        places = enumerate(entry["parts"]) if "parts" in entry else [(None, entry)]
        for rank, place in places:
            ranges.setdefault(place["file"], []).append((place["offset"], place["offset"] + size))
            owner.setdefault(place["file"], set()).add(rank)
    assert sorted(map(tuple, owner.values()), key=str) == [(0,), (1,), (None,)]
    for file, taken in ranges.items():
        taken.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(taken))
        with safe_open(folder / "two.ingot" / file, "pt") as stored:
            held = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
        assert held == sum(end - begin for begin, end in taken), "a file holds what its entries say and nothing else"


def test_a_rank_opens_its_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    mapped: Callable[..., Any] = weights_module.map_file
    monkeypatch.setattr(
        weights_module, "map_file", lambda artifact, path: opened.append(path) or mapped(artifact, path)
    )
    map_weights(open_artifact(folder / "two.ingot"), ranks(MESH)[1])
    assert sorted(opened) == ["weights/00000.safetensors", "weights/rank1/00000.safetensors"]


def test_ranks_of_the_artifact_compute_what_one_device_does(folder: Path, tmp_path: Path) -> None:
    """Program and weights as they were written, every rank with what it loaded."""
    artifact = open_artifact(folder / "two.ingot")
    program = parse_program((folder / "two.ingot" / "program.ir").read_text())
    assert program.mesh == MESH
    run = MeshRun(program, [map_weights(artifact, rank) for rank in ranks(MESH)])
    found = teacher_forced(program.input_types(), run, [[5, 6, 7, 8], [9]], chunk=3)
    alone = parse_program((folder / "two.ingot" / "trace" / "00-traced.ir").read_text())
    read = Checkpoint.open(folder / "checkpoint").read
    expected = teacher_forced(
        alone.input_types(), InterpreterRun(alone, load_params(alone.params, read)), [[5, 6, 7, 8], [9]]
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_ranks_share_a_position(folder: Path) -> None:
    file = PlanFile.model_validate_json((folder / "two.ingot" / "plan.json").read_text())
    assert file.ranks == ("all", "all") and file.of(0) == file.of(1)
    check_positions(file, MESH)


def test_binding_as_one_device_is_refused(folder: Path) -> None:
    """Tools that run an artifact in one process say so; serving starts the other ranks."""
    with pytest.raises(TargetError) as caught:
        bind(open_artifact(folder / "two.ingot"))
    assert caught.value.what == "the artifact was compiled for 2 ranks (tp=2)"
    assert caught.value.expected == "one: only serving runs several ranks"


def test_the_golden_run_of_all_ranks_repeats(folder: Path) -> None:
    found = verify(folder / "two.ingot")
    assert found.wrong == 0 and found.promise is Promise.BITWISE and not found.changed


def test_costs_are_those_of_a_rank(folder: Path) -> None:
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    calls = explain(folder / "two.ingot", RequestedStep(tokens=1)).buckets[0].calls
    assert all(call.seconds is None for call in calls), "nothing ran"
    (down,) = [call for call in calls if call.op == "ingot.linear" and call.layer == 0][-1:]
    assert down.flops == 2 * config["hidden_size"] * config["intermediate_size"] // 2
    reduced = [call for call in calls if call.op == "ingot.all_reduce"]
    assert {(call.flops, call.bytes) for call in reduced} == {(config["hidden_size"], 8 * config["hidden_size"])}


def test_tools_read_the_rows_of_a_rank(folder: Path) -> None:
    """Of a step of nine tokens, a rank adds and norms five rows. The golden run has steps that do not divide."""
    path, passes = folder / "rows.ingot", "default,sequence-parallel{steps=all}"
    compile_model(folder / "checkpoint", path, mesh=MESH, passes=passes, check_numerics=True, **LIMITS)  # type: ignore[arg-type]
    hidden = json.loads((folder / "checkpoint" / "config.json").read_text())["hidden_size"]
    calls = explain(path, RequestedStep(tokens=9, sequences=1, context=9)).buckets[0].calls
    scattered = [call for call in calls if call.op == "ingot.reduce_scatter"]
    assert len(scattered) == 3 and {call.flops for call in scattered} == {5 * hidden}
    found = verify(path)
    assert found.wrong == 0 and found.promise is Promise.BITWISE and not found.changed


def test_a_rank_of_another_mesh_is_refused(folder: Path) -> None:
    artifact = open_artifact(folder / "two.ingot")
    for rank in (Rank(0, ()), Rank(2, (("tp", 2, 3),))):
        with pytest.raises(ArtifactError, match="it has parts of 2 ranks"):
            map_weights(artifact, rank)


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ({"tp": 4}, "has 6 parts of 14, which do not divide among 4 ranks"),
        ({"ep": 2}, "unknown mesh axis 'ep'"),
        ({"tp": 0}, "mesh axis tp is 0"),
    ],
)
def test_meshes_that_cannot_be_are_refused(mesh: dict[str, int], problem: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=problem):
        compile_model(folder / "checkpoint", tmp_path / "no.ingot", mesh=mesh, **LIMITS)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_damaged_mesh_is_refused() -> None:
    class Manifest:
        model = {"mesh": "tp=many"}  # noqa: RUF012

    with pytest.raises(IngotError, match="the mesh is 'tp=many'"):
        mesh_of(Manifest())  # type: ignore[arg-type]


def test_tied_parts_are_one_tensor(tmp_path: Path) -> None:
    """Equal recipe, placement and type: each rank has one tensor for both params."""
    from ingot.ir.recipe import shard

    spec = ParamSpec(TensorType(torch.float32, (2, 3)), shard(source("w"), "tp", 0), (Placement("tp", "shard", 0),))
    stored = torch.arange(12.0).view(4, 3)
    reads: list[str] = []
    with ArtifactWriter(tmp_path / "a.ingot") as writer:
        packed = pack_weights(
            {"": Wanted({"a": spec, "b": spec}, writer)}, lambda name: reads.append(name) or stored, writer, mesh=MESH
        )
        index = json.loads(writer.path("weights.json").read_text())
    assert (packed.bytes, packed.tensors, packed.params) == (48, 1, 2) and reads == ["w"], "read once for all ranks"
    assert index["b"]["same_as"] == "a" and [part["file"] for part in index["a"]["parts"]] == [
        "weights/rank0/00000.safetensors",
        "weights/rank1/00000.safetensors",
    ]


def test_one_device_is_a_mesh_of_none(folder: Path, tmp_path: Path) -> None:
    """An axis of size one is no axis: the request is the one without a mesh."""
    from ingot.compile.request import Request

    keys = []
    for mesh in ({}, {"tp": 1}, MESH):
        request = Request.read(folder / "checkpoint", mesh=mesh, backend="reference", max_seq_len=64)
        keys.append((request.mesh, request.pipeline()))
    assert keys[0] == keys[1] and keys[2][0] == MESH and len(keys[2][1]) == len(keys[0][1]) + 1
