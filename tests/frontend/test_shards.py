"""The index of a checkpoint and its shards must agree."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_index, refusal, some_tensors, write_checkpoint
from safetensors.torch import save_file

from ingot.frontend.checkpoint import Checkpoint


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "absent", some_tensors(), 2)
    edit_index(folder, a__weight="drop")
    assert "a.weight in model-00001-of-00002.safetensors, in the index: absent" in refusal(folder)

    folder = write_checkpoint(tmp_path / "lost", some_tensors(), 2)
    edit_index(folder, nothing="model-00001-of-00002.safetensors")
    assert "nothing not in model-00001-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "elsewhere", some_tensors(), 2)
    edit_index(folder, a__weight="model-00002-of-00002.safetensors")
    assert "a.weight not in model-00002-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "shard", some_tensors(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 shards are missing: model-00002-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "both", some_tensors(), 2)
    save_file(some_tensors(), folder / "model.safetensors")
    assert "both model.safetensors and an index" in refusal(folder)


def test_an_index_of_the_single_file_is_taken(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    weight_map = dict.fromkeys(some_tensors(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Checkpoint.open(folder).tensors.keys() == weight_map.keys()


@pytest.mark.parametrize(
    "shard",
    ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "a\\b.safetensors", "", "x", 3, None, []],
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, shard: object) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "evil.safetensors")
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    edit_index(folder, x=shard)
    assert "plain name" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', "{", '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000]
)
def test_malformed_indexes_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(folder)
