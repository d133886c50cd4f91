"""What config.json may be."""

from pathlib import Path

import pytest
from checkpoint_files import some_tensors, write_checkpoint

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import ConfigError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "type list"),
        (b"3", "type int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": ' * 100_000, "nested deeper"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "nested deeper"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "too large"),
        (rb'{"a": "\uDC00"}', "surrogate"),
    ],
)
def test_malformed_configurations(tmp_path: Path, data: bytes, message: str) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        Checkpoint.open(folder)


def test_a_configuration_may_be_sixty_four_levels_deep(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_bytes(b'{"a": ' * 64 + b"1" + b"}" * 64)
    Checkpoint.open(folder)


def test_a_configuration_may_hold_infinity(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert Checkpoint.open(folder).config["time_step_limit"][1] == float("inf")
