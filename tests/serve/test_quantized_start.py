"""A checkpoint that is quantized on its way to serving: formats reach the compile, and the cache separates them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_world import write_checkpoint

from ingot import LLM, AsyncLLM, compile_model, open_artifact
from ingot.cli.main import BAD_INPUT, INGOT, run
from ingot.compile.cached import main
from ingot.compile.request import Request
from ingot.serve.find_artifact import find_artifact

LIMITS: dict[str, Any] = {"target": "cpu", "backend": "reference", "max_batch": 2, "max_tokens": 32, "max_seq_len": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("quantized") / "tiny")


def key(checkpoint: Path, scheme: str | None) -> str:
    """The compile cache's key of an artifact."""
    request = Request.read(checkpoint, quantize=scheme, **LIMITS)
    return request.key(request.trace())


def test_the_cache_has_an_artifact_for_each_format(checkpoint: Path) -> None:
    assert len({key(checkpoint, scheme) for scheme in (None, "int8", "fp8", "fp8_per_channel_per_token")}) == 4


def test_the_child_process_compiles_the_format(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child runs in this process, which has imported torch."""

    def child(command: list[str], **_: Any) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", command[2:])
        main()
        return SimpleNamespace(stdout=capsys.readouterr().out, returncode=0)

    monkeypatch.setattr(subprocess, "run", child)
    found = open_artifact(find_artifact(checkpoint, {"quantize": "int8", **LIMITS, "jobs": 1}, ["awq"]))
    assert found.manifest.request_key == key(checkpoint, "int8")
    assert len(LLM(found.folder).generate({"prompt_token_ids": [5, 9, 2]})[0].outputs[0].token_ids) > 0


def test_gguf_files_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, and a folder with one; the child process reads them."""
    seen: list[str] = []

    def child(command: list[str], **_: Any) -> SimpleNamespace:
        seen.append(command[3])
        return SimpleNamespace(stdout='{"path": "found.ingot"}', returncode=0)

    monkeypatch.setattr(subprocess, "run", child)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for given in (tmp_path / "model.gguf", tmp_path):
        assert find_artifact(given, {}) == Path("found.ingot")
        assert seen.pop() == str(given)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path) -> Path:
    compile_model(checkpoint, checkpoint.parent / "m.ingot", jobs=1, **LIMITS)
    return checkpoint.parent / "m.ingot"


@pytest.mark.parametrize("serve", [LLM, AsyncLLM])
def test_the_format_reaches_the_compile(
    serve: type[LLM | AsyncLLM], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def found(model: Any, options: dict[str, Any]) -> Path:
        seen.append(options)
        return artifact

    monkeypatch.setattr(f"{serve.__module__}.find_artifact", found)
    serve("org/name", quantize="fp8")
    serve("org/name")
    assert seen == [{"quantize": "fp8"}, {}]


@pytest.mark.parametrize(
    "command",
    [["run", "{model}", "a"], ["serve", "{model}"], ["run-batch", "--model", "{model}", "-i", "{in}", "-o", "{out}"]],
    ids=lambda command: command[0],
)
def test_commands_refuse_to_quantize_an_artifact(
    command: list[str], artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("{}")
    places = {"{model}": artifact, "{in}": tmp_path / "in", "{out}": tmp_path / "out"}
    assert run(INGOT, [*(str(places.get(one, one)) for one in command), "--quantize", "fp8"]) == BAD_INPUT
    told = " ".join(capsys.readouterr().err.split())
    assert "takes no option 'quantize'" in told and "compile-model CHECKPOINT -o NAME.ingot --quantize fp8" in told
