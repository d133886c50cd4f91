"""Opening good checkpoints: what they give is what the safetensors library gives."""

import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import some_tensors, write_checkpoint, write_raw
from safetensors import SafetensorError
from safetensors.torch import load_file

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.safetensors_header import DTYPES
from ingot.ir.artifact import digest as digest_module
from ingot.ir.errors import CheckpointError


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_equal_the_librarys(tmp_path: Path, shards: int) -> None:
    tensors = some_tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors, shards))
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info, read = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_reads_as_the_library_reads_it(tmp_path: Path, code: str) -> None:
    data = bytes(range(1, 33)) if code != "BOOL" else bytes([0, 1] * 16)
    count = 32 // DTYPES[code].itemsize
    header = {"x": {"dtype": code, "shape": [2, count // 2], "data_offsets": [0, 32]}}
    (tmp_path / "config.json").write_text("{}")
    file = write_raw(tmp_path / "model.safetensors", header, data)
    read = Checkpoint.open(tmp_path).read("x")
    assert read.shape == (2, count // 2)
    try:
        theirs = load_file(file)["x"]
    except SafetensorError:
        pytest.skip(f"this version of the library does not know {code}")
    assert read.dtype == theirs.dtype
    assert torch.equal(read.view(torch.uint8), theirs.view(torch.uint8))


def test_read_maps_the_file_and_never_writes_to_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"x": torch.arange(1024.0), "y": torch.ones(1024)})
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(folder)
    first, again = checkpoint.read("x"), checkpoint.read("x")
    assert first.data_ptr() == again.data_ptr()  # the same pages, so nothing was copied
    first.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_tensors_stay_valid_when_pages_are_released(tmp_path: Path) -> None:
    tensors = some_tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors))
    read = {name: checkpoint.read(name) for name in tensors}
    checkpoint.release_pages()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and torch.equal(checkpoint.read(name), tensor)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]},
    }
    (tmp_path / "config.json").write_text("{}")
    write_raw(tmp_path / "model.safetensors", header, b"\x01\x02\x03" + values.numpy().tobytes())
    read = Checkpoint.open(tmp_path).read("x")
    assert torch.equal(read, values)
    assert read.data_ptr() % 4 == 0


def test_read_refuses_unknown_names_and_files_that_shrank(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        checkpoint.read("nothing")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="shrank"):
        checkpoint.read("a.weight")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        checkpoint.read("a.weight")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.digests()


def test_digests_see_every_byte_by_file_and_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "CHUNK_BYTES", 64)  # many chunks in a small file
    one = Checkpoint.open(write_checkpoint(tmp_path / "one", some_tensors(), 2))
    two = Checkpoint.open(write_checkpoint(tmp_path / "two", some_tensors(), 2))
    assert one.digests() == two.digests() == one.digests(threads=1)
    shard = tmp_path / "two" / "model-00002-of-00002.safetensors"
    original = shard.read_bytes()
    for position in (len(original) - 1, original.index(b"F")):
        data = bytearray(original)
        data[position] ^= 1
        shard.write_bytes(data)
        mine, theirs = one.digests(), two.digests()
        assert (
            mine.keys() == theirs.keys()
            and mine["model-00001-of-00002.safetensors"] == theirs["model-00001-of-00002.safetensors"]
        )
        pairs = zip(mine[shard.name], theirs[shard.name], strict=True)
        assert [index for index, pair in enumerate(pairs) if pair[0] != pair[1]] == [position // 64]
    renamed = {"one": tmp_path / "one" / "model-00001-of-00002.safetensors", "to": tmp_path / "one" / "zz.safetensors"}
    renamed["one"].rename(renamed["to"])
    index = tmp_path / "one" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(renamed["one"].name, renamed["to"].name))
    before = one.tensors["a.weight"].file
    assert Checkpoint.open(tmp_path / "one").tensors["a.weight"].file != before
    shard.write_bytes(original)
    renamed_digests, digests = Checkpoint.open(tmp_path / "one").digests(), two.digests()
    assert sorted(renamed_digests.values()) == sorted(digests.values()) and "zz.safetensors" in renamed_digests


def test_tokenizer_files_are_those_present(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text("{}")
    found = Checkpoint.open(folder).tokenizer_files
    assert dict(found) == {name: folder / name for name in ("chat_template.jinja", "tokenizer.json")}


def test_code_in_a_checkpoint_is_never_imported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_evil.Evil"}}')
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert Checkpoint.open(folder).config["auto_map"] == {"AutoModel": "modeling_evil.Evil"}
    assert not (tmp_path / "ran").exists()
    assert "modeling_evil" not in sys.modules
