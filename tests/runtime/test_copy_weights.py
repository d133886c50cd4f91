"""Weights copied to a device: the bytes of the files at aligned addresses, each byte read once and digested."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_seed import again, run_seed
from safetensors.torch import save_file

from ingot.compile.publish import ArtifactWriter
from ingot.ir.artifact import digest as digest_module
from ingot.ir.artifact import manifest as schema
from ingot.ir.artifact.manifest import Manifest
from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import ranks
from ingot.ir.types import DTYPE_NAMES
from ingot.runtime.cuda import weights as copying
from ingot.runtime.cuda.weights import ALIGNMENT, WeightCopy
from ingot.runtime.loading.artifact import Artifact, open_artifact
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.weights import map_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK, BLOCK = 1000, 300
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float16, torch.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 1000 bytes and blocks of 300, so that tensors begin and end anywhere in them."""
    for module in (digest_module, schema, sys.modules["ingot.runtime.loading.artifact"], copying):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(copying, "BLOCK_BYTES", BLOCK)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], more: dict[str, Any] | None = None) -> Artifact:
    """An artifact of these tensors by weight file, and of further entries of weights.json."""
    index: dict[str, Any] = {}
    with ArtifactWriter(folder) as writer:
        for file, tensors in files.items():
            save_file(tensors, writer.path(file))
            data = writer.path(file).read_bytes()
            begin = header_bytes(writer.path(file))
            for name, info in json.loads(data[8:begin]).items():
                index[name] = {
                    "recipe": name,
                    "dtype": DTYPE_NAMES[tensors[name].dtype],
                    "shape": list(tensors[name].shape),
                    "shard": [],
                    "file": file,
                    "offset": begin + info["data_offsets"][0],
                }
        writer.write_json("weights.json", {**index, **(more or {})})
        writer.publish(
            Manifest(
                schema_version=schema.SCHEMA_VERSION,
                name="tiny",
                request_key="ab" * 32,
                exe_keys=(),
                target={},
                versions={},
                model={},
            )
        )
    return open_artifact(folder)


def draw(seed: str, count: int) -> dict[str, torch.Tensor]:
    pick = random.Random(seed)
    tensors = {}
    for number in range(count):
        shape = [pick.choice((0, 1, 3, 7, 64, 128)) for _ in range(pick.randint(0, 2))] or [pick.randint(1, 900)]
        dtype = pick.choice(DTYPES)
        tensors[f"w{number}"] = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(number)).to(
            dtype
        )
    return tensors


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """What is drawn, and in the second of three files one that has several chunks whatever the others have."""
    return {**draw(run_seed(), 25), "w25": torch.arange(CHUNK, dtype=torch.int32)}


@pytest.fixture
def artifact(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Artifact:
    names = list(tensors)
    files = {
        f"weights/{number:05d}.safetensors": {name: tensors[name] for name in names[number::3]} for number in range(3)
    }
    same = {"recipe": "w0", "dtype": "f32", "shape": [], "shard": [], "same_as": "w0"}
    return write(tmp_path / "a.ingot", files, {"again": same})


@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_tensors_are_those_of_the_files(
    artifact: Artifact, tensors: dict[str, torch.Tensor], threads: int | None
) -> None:
    copied = WeightCopy(artifact, on_one_device(DEVICE.type), threads=threads).run()
    assert copied.keys() == {*tensors, "again"}
    for name, tensor in tensors.items():
        found = copied[name]
        assert found.device.type == DEVICE.type
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and found.is_contiguous()
        assert torch.equal(found.cpu(), tensor), again(name)
        assert found.storage_offset() * found.itemsize % ALIGNMENT == 0
    assert copied["again"] is copied["w0"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in copied.values()}
    assert len(storages) == 3, "an allocation for each file"


def test_each_byte_is_read_once(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        # A disk may give less than was asked for.
        count = real(descriptor, [buffers[0][:97]], offset)
        reads.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    expected = {name: tensor.clone() for name, tensor in map_weights(artifact).items()}
    copied = WeightCopy(artifact, on_one_device(DEVICE.type), threads=2).run()
    assert all(torch.equal(copied[name].cpu(), tensor) for name, tensor in expected.items())
    sizes = [entry.size for entry in artifact.manifest.files if entry.path.startswith("weights/")]
    assert sum(count for _, count in reads) == sum(sizes)


def positions(path: Path) -> Iterator[int]:
    size = path.stat().st_size
    yield from (0, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, size // 2, size - 1)


def test_a_changed_byte_is_found_wherever_it_is(artifact: Artifact) -> None:
    path = artifact.folder / "weights/00001.safetensors"
    whole = path.read_bytes()
    for position in positions(path):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        place = rf"weights/00001\.safetensors, chunk {position // CHUNK} \(from byte {position // CHUNK * CHUNK} on\)"
        with pytest.raises(ArtifactError, match=place) as caught:
            WeightCopy(artifact, on_one_device(DEVICE.type), threads=3).run()
        with pytest.raises(ArtifactError) as usual:
            artifact.verify_files(artifact.weight_files())
        assert str(caught.value) == str(usual.value)
        WeightCopy(artifact, on_one_device(DEVICE.type), verify=False).run()
    path.write_bytes(whole)
    WeightCopy(artifact, on_one_device(DEVICE.type)).run()


def test_every_damaged_chunk_is_listed(artifact: Artifact) -> None:
    for file in artifact.weight_files():
        path = artifact.folder / file
        path.write_bytes(bytes(byte ^ 255 for byte in path.read_bytes()))
    chunks = len(artifact.chunks(artifact.weight_files()))
    with pytest.raises(ArtifactError, match=f"damaged in {chunks} chunks"):
        WeightCopy(artifact, on_one_device(DEVICE.type)).run()


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_shrinks_or_goes_while_loading(artifact: Artifact, verify: bool) -> None:
    path = artifact.folder / "weights/00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=rf"00002\.safetensors ends before byte {len(whole)}"):
        WeightCopy(artifact, on_one_device(DEVICE.type), verify=verify).run()
    path.unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        WeightCopy(artifact, on_one_device(DEVICE.type), verify=verify).run()


def test_weights_that_share_bytes_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = "weights/00000.safetensors"
    overlapping = {"recipe": "w", "dtype": "i8", "shape": [10], "shard": [], "file": file, "offset": 200}
    artifact = write(tmp_path / "a.ingot", {file: {"w": torch.arange(300)}}, {"v": overlapping})
    with pytest.raises(ArtifactError, match="share no bytes"):
        WeightCopy(artifact, on_one_device(DEVICE.type)).run()
    with pytest.raises(ArtifactError, match="share no bytes"):
        map_weights(artifact)


def test_a_rank_copies_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = torch.arange(700), torch.arange(700, 1400)
    files = {"weights/rank0/00000.safetensors": {"theirs": theirs}, "weights/rank1/00000.safetensors": {"mine": mine}}
    first = write(tmp_path / "first.ingot", files)
    offset = header_bytes(first.folder / "weights/rank0/00000.safetensors")
    places = [{"file": file, "offset": offset} for file in files]
    split = {"recipe": "w", "dtype": "i64", "shape": [700], "shard": ["shard(0)"], "parts": places}
    artifact = write(tmp_path / "b.ingot", files, {"theirs": split, "mine": split})
    opened: set[int] = set()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: opened.add(os.fstat(fd).st_ino) or real(fd, *rest))
    copied = WeightCopy(artifact, replace(on_one_device(DEVICE.type), rank=ranks({"tp": 2})[1])).run()
    assert torch.equal(copied["mine"].cpu(), mine)
    assert opened == {(artifact.folder / "weights/rank1/00000.safetensors").stat().st_ino}


@pytest.mark.parametrize(("mesh", "threads"), [({}, 12), ({"tp": 2}, 6), ({"pp": 4, "tp": 8}, 1)])
def test_ranks_divide_the_cores(
    mesh: dict[str, int], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank hashes and copies its part on its part of the cores."""
    artifact = write(tmp_path / "a.ingot", {"weights/0.safetensors": {"x": torch.zeros(3)}})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    seen: list[int] = []
    copy_all = copying._copy_all
    monkeypatch.setattr(copying, "_copy_all", lambda *given: [seen.append(given[4]), copy_all(*given)][1])
    WeightCopy(artifact, replace(on_one_device(DEVICE.type), mesh=mesh)).run()
    assert seen == [threads]
