"""A tiny checkpoint with a tokenizer, and its traced program."""

from pathlib import Path

import pytest
from calibrated_model import write_model, write_text

from ingot.compile.request import Request
from ingot.ir.program import Program


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quantizing") / "checkpoint")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="session")
def request_of(checkpoint: Path) -> Request:
    return Request.read(checkpoint, target="cpu", backend="reference", max_seq_len=128)


@pytest.fixture(scope="session")
def program(request_of: Request) -> Program:
    return request_of.trace().entries["main"]
