"""Folders that are no checkpoint: pickle, other files, nothing at all."""

from pathlib import Path

import pytest
from checkpoint_files import edit_index, refusal, some_tensors, write_checkpoint

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickle_is_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    # A pickle that would make a file if anything loaded it.
    (tmp_path / name).write_bytes(f"cbuiltins\nopen\n(V{tmp_path / 'ran'}\nVw\ntR.".encode())
    text = refusal(tmp_path)
    assert name in text
    assert "safetensors" in text
    with pytest.raises(CheckpointError, match="convert it to safetensors"):
        Checkpoint.open(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_an_index_of_pickle_files_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    edit_index(folder, x="pytorch_model.bin")
    assert "names a pickle file: 'pytorch_model.bin'" in refusal(folder)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "adapter_model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("path", ["no-such-owner/no-such-model", "gpt2-not-here"])
def test_a_name_on_the_hub_is_no_folder(path: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no folder '.*or the name of a repository on the hub"):
        Checkpoint.open(path)


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "absent", "no folder"),
        (tmp_path / "file", "not a folder"),
        (tmp_path / "file" / "below", "no folder"),
        ("a\0b", "cannot be opened|no folder"),
        ("x" * 5000, "cannot be opened"),
        (tmp_path, "no config.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            Checkpoint.open(path)
