"""Options from variables and from a file: which one counts, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ingot.cli.main as cli


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("INGOT_SERVE_"):
            monkeypatch.delenv(name)


def parsed(*arguments: object) -> dict[str, Any]:
    """The arguments that the function of `ingot serve` would get."""
    _, bound, *_ = cli.INGOT.parse_args(["serve", *map(str, arguments)], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_the_command_line_then_variables_then_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: models/pico\nport: 1\nmax-queue: 10\nread_seconds: 1.5\nno-ui: true\nserved-model-name: [a, b]\n"
        "strict: false\nallowed_host: one\n"
    )
    assert parsed("--config", file) == {
        "model": "models/pico",
        "config": file,
        "port": 1,
        "max_queue": 10,
        "read_seconds": 1.5,
        "no_ui": True,
        "strict": False,
        "served_model_name": ("a", "b"),
        "allowed_host": ("one",),
    }
    monkeypatch.setenv("INGOT_SERVE_PORT", "2")
    monkeypatch.setenv("INGOT_SERVE_SERVED_MODEL_NAME", "c, d")
    monkeypatch.setenv("INGOT_SERVE_UDS", "a,b")
    monkeypatch.setenv("INGOT_SERVE_STRICT", "1")
    monkeypatch.setenv("INGOT_SERVE_MAX_QUEUE", "")
    found = parsed("--config", file)
    assert found["port"] == 2 and found["served_model_name"] == ("c", "d") and found["uds"] == Path("a,b")
    assert found["strict"] is True and found["max_queue"] == 10
    found = parsed("other", "--config", file, "--port", 3, "--allowed-host", "two")
    assert found["port"] == 3 and found["allowed_host"] == ("two",) and found["model"] == "other"
    monkeypatch.setenv("INGOT_SERVE_CONFIG", str(file))
    monkeypatch.setenv("INGOT_SERVE_MODEL", "of a variable")
    assert parsed()["max_queue"] == 10 and parsed()["model"] == "of a variable"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1", ("'prot' is no option", "expected: port")),
        ("config: other.yaml", ("'config' is no option",)),
        ("port: abc", ("--port", "abc", "serve.yaml")),
        ("port: [1, 2]", ("port is a list", "one value")),
        ("port: {a: 1}", ("port is a dict",)),
        ("port:", ("port is a NoneType",)),
        ("port: []", ("port is an empty list",)),
        ("strict: 7", ("--strict",)),
        ("- port", ("is no mapping",)),
        ("", ("is no mapping",)),
        ("max-queue: 1\nmax_queue: 2", ("max-queue is there twice",)),
        ("port: [", ("cannot be read", "line 1")),
        ("\x00", ("cannot be read",)),
        ("!!python/object/apply:os.system ['true']", ("cannot be read",)),
        ("[" * 500, ("cannot be read",)),
        ("1: 2", ("'1' is no option",)),
    ],
)
def test_bad_files(text: str, complaint: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert cli.run(cli.INGOT, ["serve", "m", "--config", str(tmp_path / "serve.yaml")]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert all(part in said for part in complaint), said


def test_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(cli.INGOT, ["serve", "m", "--config", "nowhere.yaml"]) == cli.BAD_INPUT
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("INGOT_SERVE_PROT", "1", ("names no option", "expected: INGOT_SERVE_PORT")),
        ("INGOT_SERVE_API_KEY", "secret", ("set INGOT_API_KEY",)),
        ("INGOT_SERVE_SERVICE_HOST", "10.0.0.1", ("Kubernetes",)),
        ("INGOT_SERVE_PORT", "tcp://10.0.0.1:80", ("--port", "from INGOT_SERVE_PORT")),
    ],
)
def test_bad_variables(
    name: str,
    value: str,
    complaint: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.run(cli.INGOT, ["serve", "m"]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert all(part in said for part in complaint) and "secret" not in said, said


def test_other_commands_read_no_such_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_SERVE_PROT", "1")
    command, *_ = cli.INGOT.parse_args(["run", "a.ingot"], exit_on_error=False, print_error=False)
    assert command.__name__ == "run_model"
