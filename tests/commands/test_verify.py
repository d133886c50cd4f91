"""`ingot verify` at the command line: a table or JSON, and an exit code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resign import edit_json

from ingot.cli.main import BAD_INPUT, DONE, INGOT, run
from ingot.ir.artifact.manifest import GOLDEN

pytestmark = pytest.mark.xdist_group("parity-llama-plain")  # the artifact that the parity tests compile too


@pytest.fixture
def plain(artifact: Callable[..., Path]) -> Path:
    return artifact("llama-plain", backend="reference")


@pytest.fixture
def wrong(plain: Path, tmp_path: Path) -> Path:
    """An artifact whose golden run recorded other bits in one row, and another token."""
    copy = Path(shutil.copytree(plain, tmp_path / "wrong.ingot"))

    def edit(golden: dict) -> None:
        row = golden["entries"]["main"]["steps"][1]["rows"][2]
        row["digest"], row["token"] = "0" * 64, (row["token"] + 1) % 300

    edit_json(copy, GOLDEN, edit)
    return copy


def test_a_table(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INGOT, ["verify", str(plain)]) == DONE
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines()]
    assert ["any", "5", "47", "47", "47", "0", "0"] in lines and "\nThe golden run repeats.\n" in said.out
    assert said.out.endswith("when it was compiled. `ingot bisect` checks whether that is correct.\n")
    assert said.err == "" and "\x1b" not in said.out


def test_json(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INGOT, ["verify", str(plain), "--json"]) == DONE
    value = json.loads(capsys.readouterr().out)
    assert value["holds"] is True and value["promise"] == "bitwise" and value["error"] is None
    assert [(one["bucket"], one["positions"], one["bitwise_equal"]) for one in value["results"]] == [("any", 47, 47)]


def test_a_mismatch(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INGOT, ["verify", str(wrong)]) == BAD_INPUT
    said = capsys.readouterr()
    assert "repeats" not in said.out and "46" in said.out
    assert "error: the golden run does not repeat" in said.err
    assert "logits or tokens of 1 of 47 positions differ" in said.err
    assert said.err.count("step 1 (bucket class any), request 0, position 19") == 2  # of the logits and of the token
    assert "the same bits" in said.err and f"ingot bisect {wrong}" in said.err

    assert run(INGOT, ["verify", str(wrong), "--json"]) == BAD_INPUT
    value = json.loads(capsys.readouterr().out)
    assert value["holds"] is False and value["wrong"] == 1
    assert value["first"]["step"] == 1 and value["first"]["position"] == 19 and value["first"] == value["first_token"]


def test_what_is_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(INGOT, ["verify", str(tmp_path)]) == BAD_INPUT
    assert "is no artifact" in capsys.readouterr().err
    assert run(INGOT, ["verify"]) == BAD_INPUT
