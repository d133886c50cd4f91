"""`ingot bisect`: what it prints, how it ends, and the oracles it takes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from drawn import in_one_of
from tiny import TINY

from ingot import compile_model
from ingot.cli.commands.bisect import CULPRIT, default_output
from ingot.cli.main import INGOT, run
from ingot.debug.bisect import bisect
from ingot.debug.bisect.programs import oracles
from ingot.debug.bisect.verdict import Kind
from ingot.ir import ops
from ingot.ir.errors import OptionError, OutputError
from ingot.models.blocks import attention, feed_forward

pytestmark = [pytest.mark.xdist_group("bisect"), pytest.mark.one_in_file(3)]

OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 8, "max_tokens": 1024, "max_seq_len": 160}
_ORACLE = """
import torch

def oracle(requests):
    return [torch.zeros(len(request), {vocab}) for request in requests]
"""


@pytest.fixture
def healthy(artifact: Callable[..., Path]) -> Path:
    return artifact("llama-plain", **OPTIONS)


def test_healthy(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(INGOT, ["bisect", str(healthy)]) == 0
    assert "healthy: no fault found" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "there is nothing to show"


@in_one_of(3)
def test_a_script_is_an_oracle(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zeros.py").write_text(_ORACLE.format(vocab=389))
    assert run(INGOT, ["bisect", str(healthy), "--oracle", "zeros.py", "--json"]) == CULPRIT
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["kind"], verdict["tensor"]) == ("definition", "logits")
    assert "request 0" in verdict["found"] and "all passes keep the meaning" in verdict["found"]
    assert run(INGOT, ["bisect", str(healthy), "--oracle", "zeros.py"]) == CULPRIT
    assert "definition" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "there is no oracle"), ("x = 1", "defines no function"), ("oracle = 3", "no function")]
)
def test_what_is_no_oracle(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "oracle.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=problem):
        oracles.open_oracle(path)


def test_transformers_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install transformers"):
        oracles.open_oracle("transformers")


def test_what_shows_the_fault_lies_beside_the_artifact(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_output("made/early.ingot/") == Path("made/early.bisect")
    assert default_output("early") == Path("early.bisect")
    (tmp_path / "here.ingot").mkdir()
    monkeypatch.chdir(tmp_path / "here.ingot")
    assert default_output(".") == tmp_path / "here.bisect"
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be made"):
        bisect(healthy, output=tmp_path / "file" / "fault")


class _Ops:
    """The ops as a definition calls them, with one that does otherwise."""

    def __init__(self, name: str, other: Callable[..., Any]) -> None:
        self._name, self._other = name, other

    def __getattr__(self, name: str) -> Any:
        return self._other if name == self._name else getattr(ops, name)


def _wrong_scale(*args: Any, **kwargs: Any) -> torch.Tensor:
    return ops.attention(*args, **{**kwargs, "scale": kwargs["scale"] * 1.02})


def _swapped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return ops.silu_mul(up, gate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other", "block", "module"),
    [
        ("attention", _wrong_scale, attention, "model.layers.0.self_attn"),
        ("silu_mul", _swapped, feed_forward, "model.layers.0.mlp"),
    ],
)
def test_transformers_finds_what_is_wrong_in_a_definition(
    name: str,
    other: Callable[..., Any],
    block: ModuleType,
    module: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block, "ops", _Ops(name, other))
        compile_model(checkpoint("llama-plain"), tmp_path / "a.ingot", **OPTIONS)
        verdict = bisect(tmp_path / "a.ingot", oracle="transformers")
    assert (verdict.kind, verdict.node, verdict.layer) == (Kind.DEFINITION, name, 0)
    assert verdict.origin.startswith(f"layer 0, blocks/{Path(block.__file__ or '').name}:") and module in verdict.found


@pytest.mark.parametrize(
    ("name", "max_seq_len"),
    [
        pytest.param("llama-plain", 160, marks=pytest.mark.slow),
        pytest.param("gemma2-capped", 160, marks=pytest.mark.slow),
        pytest.param("granite-scaled", 160, marks=pytest.mark.slow),
        pytest.param("llama-dynamic", 160, marks=pytest.mark.slow),
        # Compiled for more than the original context, and for less, whatever the length of the prompts.
        ("phi3-long", TINY["phi3-long"].max_seq_len),
        pytest.param("phi3-long", 30, marks=pytest.mark.slow),
    ],
)
def test_transformers_agrees_with_a_definition_that_is_right(
    name: str, max_seq_len: int, artifact: Callable[..., Path]
) -> None:
    path = artifact(name, **{**OPTIONS, "max_seq_len": max_seq_len})
    assert bisect(path, oracle="transformers").kind is Kind.HEALTHY
