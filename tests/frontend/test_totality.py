"""Every tensor of a checkpoint is used or ignored by a rule, and every one that is expected is there."""

from pathlib import Path

import pytest
import torch
from checkpoint_files import write_checkpoint

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.totality import check_totality
from ingot.ir.errors import CheckpointError


def test_totality_lists_everything_at_once(tmp_path: Path) -> None:
    tensors = {
        "used": torch.ones(2, 3),
        "extra.one": torch.ones(1),
        "rotary.0.inv_freq": torch.ones(4),
        "misshaped": torch.ones(5, 6),
        "typed": torch.ones(7, dtype=torch.int32),
        "eight_bit": torch.ones(8).to(torch.float8_e4m3fn),
    }
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors))
    expected = {"used": (2, 3), "misshaped": (6, 5), "typed": (7,), "eight_bit": (8,), "absent": (9, 10)}
    rule = r"rotary\.\d+\.inv_freq"
    with pytest.raises(CheckpointError) as caught:
        check_totality(checkpoint, expected.keys(), [rule], expected)
    text = str(caught.value)
    assert "1 missing from the checkpoint:\n    absent [9, 10]\n" in text
    assert "1 extra, neither used nor ignored by a rule:\n    extra.one [1]\n" in text
    assert "misshaped: expected [6, 5], found [5, 6]\n" in text
    assert "2 not floating point" in text
    assert "typed: found int32" in text
    assert "eight_bit: found float8_e4m3fn" in text
    assert "rotary" not in text
    assert "used:" not in text

    good = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "rotary.0.inv_freq"}
    check_totality(checkpoint, good.keys(), [rule], good, floating=["used"])
    with pytest.raises(CheckpointError, match="rotary"):  # a rule must match the whole name
        check_totality(checkpoint, good.keys(), [rule[:-1]], good, floating=[])


def test_totality_cuts_long_lists(tmp_path: Path) -> None:
    tensors = {f"t{i:02d}": torch.ones(1) for i in range(25)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors))
    with pytest.raises(CheckpointError) as caught:
        check_totality(checkpoint, [], [], {})
    text = str(caught.value)
    assert "25 extra" in text
    assert "t19" in text
    assert "t20" not in text
    assert "5 more" in text
