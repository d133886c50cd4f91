"""What a command prints."""

import pytest

import ingot.cli.main as cli


def command_text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `ingot` with these arguments prints; it must succeed."""
    capsys.readouterr()
    code = cli.run(cli.INGOT, [str(one) for one in arguments])
    captured = capsys.readouterr()
    assert code == cli.DONE, captured.err
    return captured.out
