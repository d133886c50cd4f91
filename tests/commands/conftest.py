"""Commands run in this process, and a small world of checkpoints and artifacts to run them on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_world import LIMITS, Command, Done, World, in_process, write_checkpoint

import ingot.cli.main as cli


@pytest.fixture
def ingot(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `ingot` with arguments in this process, which has torch already."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = cli.run(cli.INGOT, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("cli")
    checkpoint = write_checkpoint(folder / "tiny model")
    bare = write_checkpoint(folder / "bare", tokenizer=False)
    artifact, wordless = folder / "tiny model.ingot", folder / "wordless.ingot"
    compile_model = Path(sys.executable).with_name("compile-model")
    compiled = in_process(compile_model, checkpoint, "-o", artifact, "--backend", "reference", *LIMITS)
    assert compiled.code == 0, compiled.err
    assert cli.run(cli.COMPILE_MODEL, [str(bare), "-o", str(wordless), "--backend", "reference", *LIMITS]) == cli.DONE
    return World(checkpoint, artifact, compiled, wordless)
