"""A tiny chat model, compiled once for all tests of serving, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_world import write_checkpoint
from http_server import HttpServer
from pooling_artifacts import write_pooling_artifacts
from scripted_chat import TOOLS_TEMPLATE, MakeChat, chat_maker
from thread_server import EngineThread, ThreadServer, thread_server

from ingot.serve.engine import client

# Room for requests that are still running when a test looks.
POSITIONS = 4096


@pytest.fixture(scope="session")
def chat_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one token a byte and a chat template; each turn ends with "<end>"."""
    from ingot import compile_model

    folder = tmp_path_factory.mktemp("serve")
    checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=POSITIONS)
    limits = {"max_batch": 8, "max_tokens": 256, "max_seq_len": POSITIONS}
    compile_model(checkpoint, folder / "tiny.ingot", target="cpu", backend="reference", jobs=1, **limits)
    return folder / "tiny.ingot"


@pytest.fixture(scope="session")
def pooling_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model without its head. "embed" returns embedding vectors, "classify" the logits of three classes."""
    return write_pooling_artifacts(tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="session")
def server(chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server that tests share. They leave it as it was."""
    running = HttpServer(chat_artifact, tmp_path_factory.mktemp("server") / "log")
    yield running
    code = running.stop()
    running.close()
    assert code == 0


@pytest.fixture(scope="module")
def engine_thread() -> Iterator[type[EngineThread]]:
    """Engines that this process starts are threads: without the seconds of a process that imports torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "start_process", EngineThread)
        yield EngineThread


@pytest.fixture(scope="module")
def tools_server(
    engine_thread: type[EngineThread], chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadServer]:
    """A server of the tiny model, in threads, with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "chat.jinja").write_text(TOOLS_TEMPLATE)
    with thread_server(chat_artifact, folder, tcp=True, chat_template=folder / "chat.jinja") as server:
        yield server


@pytest.fixture
def chat(chat_artifact: Path, tmp_path: Path) -> MakeChat:
    """Makes applications over models with scripted text."""
    return chat_maker(chat_artifact, tmp_path)
