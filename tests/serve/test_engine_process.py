"""The engine process's loop, run in this process with an engine that fails: what the server learns of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot import LLM
from ingot.ir.errors import ArtifactError, StepMemoryError
from ingot.runtime.pages.prefix_cache import PrefixCacheStats
from ingot.runtime.scheduling.occupancy import Occupancy
from ingot.serve.engine import process
from ingot.serve.engine.messages import SERVER_DECODER, Abort, Add, Failed, Frames, Ready, Refused, Start, Step, frame

pytestmark = pytest.mark.xdist_group("serve")
ADD = Add(1, [1, 2], {}, True, 0, None)


def serve(
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    *messages: Any,
    load: Callable[[], None] | None = None,
    leaves: bool = True,
) -> Any:
    """What the process sends for these messages, and whether it ended without an error.

    `leaves`: the server leaves after them."""

    def llm(artifact: str, **options: Any) -> Any:
        if load is not None:
            load()
        return SimpleNamespace(
            llm_engine=engine, timings={"ready": 1.0}, idle=lambda: False, on_fault=lambda call: None
        )

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(process, "LLM", llm)
    with ours:
        ours.sendall(b"".join(map(frame, messages)))
        if leaves:
            ours.shutdown(socket.SHUT_WR)
        whole = process.serve_connection(theirs)
        theirs.close()
        received = b""
        ours.settimeout(10)
        while piece := ours.recv(1 << 16):
            received += piece
    return [SERVER_DECODER.decode(one) for one in Frames().split(received)], whole


def engine(**parts: Any) -> Any:
    return SimpleNamespace(
        occupancy=Occupancy(0, 0, 0, 3, 0, 0, 0, 8, 0),
        prefix_cache_stats=PrefixCacheStats(),
        steps_ended=0,
        seconds_waited=0.0,
        has_unfinished=lambda: False,
        **parts,
    )


def test_an_artifact_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ArtifactError("it is damaged", where="plan.json")

    (failed,), whole = serve(monkeypatch, engine(), Start("a", {}), load=load)
    assert isinstance(failed, Failed) and failed.error["kind"] == "ArtifactError" and not whole
    assert failed.error["what"] == "it is damaged" and failed.error["where"] == "plan.json"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StepMemoryError("no memory"), "StepMemoryError", "no memory"),
        (RuntimeError("CUDA error"), "InternalError", "the engine failed: RuntimeError: CUDA error"),
    ],
)
def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, text: str) -> None:
    """The server starts another process: after an error of the device, this one could not go on."""

    def step() -> None:
        raise error

    failing = engine(step=step)
    failing.has_unfinished = lambda: True
    (ready, _, failed), whole = serve(monkeypatch, failing, Start("a", {}), leaves=False)
    assert ready == Ready(3, {"ready": 1.0}) and not whole
    assert isinstance(failed, Failed) and (failed.error["kind"], failed.error["what"]) == (kind, text)


def test_a_first_message_that_is_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    (failed,), whole = serve(monkeypatch, engine(), ADD)
    assert isinstance(failed, Failed) and "the first message is Add" in failed.error["what"] and not whole


def test_an_engine_without_tokens_refuses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, refused), whole = serve(monkeypatch, engine(), Start("a", {}), Abort(9), ADD)
    assert isinstance(refused, Refused) and refused.key == 1 and whole
    assert refused.error["kind"] == "RequestError" and "makes vectors" in refused.error["what"]


def test_a_request_with_a_fault_ends_alone(monkeypatch: pytest.MonkeyPatch, chat_artifact: Path) -> None:
    """An error that is no IngotError, from queueing one request: the engine serves the others."""
    real = LLM(chat_artifact).llm_engine

    def add_requests(requests: Any) -> None:
        if requests[0].request_id == "2":
            raise ZeroDivisionError("of the test")
        type(real).add_requests(real, requests)

    monkeypatch.setattr(real, "add_requests", add_requests)
    poisoned, other = Add(2, [3], {}, True, 0, None), Add(3, [4], {"max_tokens": 2}, False, 0, None)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(
        process,
        "LLM",
        lambda *_, **__: SimpleNamespace(llm_engine=real, timings={}, idle=lambda: False, on_fault=lambda call: None),
    )
    ours.sendall(b"".join(map(frame, (Start("a", {}), ADD, poisoned, other, Abort(1)))))
    thread = threading.Thread(target=process.serve_connection, args=(theirs,))
    thread.start()
    frames, found = Frames(), []
    ours.settimeout(30)
    while not any(isinstance(one, Step) and any(delta.key == 3 for delta in one.deltas) for one in found):
        found += [SERVER_DECODER.decode(one) for one in frames.split(ours.recv(1 << 16))]
    ours.close()
    thread.join(30)
    (refused,) = (one for one in found if isinstance(one, Refused))
    assert refused.key == 2 and refused.error["what"] == "the request failed: ZeroDivisionError: of the test"
    assert not any(isinstance(one, Failed) for one in found)
