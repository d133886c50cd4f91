"""Artifacts of another schema: refused before anything else, with the command that compiles them again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.ir.artifact.manifest import SCHEMA_VERSION
from ingot.ir.errors import ArtifactError
from ingot.runtime.loading.artifact import open_artifact


def refusal(folder: Path, version: int, timings: object = None) -> str:
    """What opening says of a manifest of `version`, whose other fields and checksums this Ingot does not know."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"schema_version": version, "novel": 1}))
    if timings is not None:
        (folder / "timings.json").write_text(timings if isinstance(timings, str) else json.dumps(timings))
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    text = str(caught.value)
    assert f"schema version {version}\n" in text and f"schema version {SCHEMA_VERSION}, the one" in text
    return text


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_the_command_names_the_checkpoint(tmp_path: Path, version: int) -> None:
    text = refusal(tmp_path / "a.ingot", version, {"checkpoint": "/models/llama 1b"})
    assert "`compile-model '/models/llama 1b' -o NAME.ingot`" in text
    newer = version > SCHEMA_VERSION
    assert ("run it with a newer Ingot" if newer else "run it with the Ingot that compiled it") in text


@pytest.mark.parametrize("timings", [None, "no json", "[]", {}, {"checkpoint": 3}, {"checkpoint": "a\nb"}])
def test_where_no_checkpoint_is_told(tmp_path: Path, timings: object) -> None:
    text = refusal(tmp_path / "a.ingot", SCHEMA_VERSION - 1, timings)
    assert "`compile-model CHECKPOINT -o NAME.ingot`" in text


def test_a_link_to_timings_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"checkpoint": "/secret"}')
    (tmp_path / "a.ingot").mkdir()
    (tmp_path / "a.ingot" / "timings.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"timings\.json is a link"):
        (tmp_path / "a.ingot" / "manifest.json").write_text('{"schema_version": 7}')
        open_artifact(tmp_path / "a.ingot")
