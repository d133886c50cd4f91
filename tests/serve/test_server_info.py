"""`/server_info`: what it says, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_server import HttpServer
from thread_server import EngineThread, thread_server

pytestmark = pytest.mark.xdist_group("serve")


def test_what_a_server_runs(server: HttpServer, chat_artifact: Path) -> None:
    response = server.http.get("/server_info")
    found = response.json()
    assert found["engine"]["state"] == "ready" and found["engine"]["task"] == "generate"
    assert found["engine"]["max_num_seqs"] == 8 and found["engine"]["vector_size"] is None
    assert found["engine"]["start_seconds"]["ready"] > 0 and found["engine"]["options"]["seed"] == 0
    assert found["model"]["served_names"][0] == "tiny" and found["model"]["facts"]["vocab_size"] == 260
    assert found["model"]["artifact_target"]["device"] == "cpu" and found["model"]["artifact_versions"]["torch"]
    assert not found["server"]["needs_key"] and found["server"]["max_waiting"] == 4096


def test_no_paths_and_no_keys(
    pooling_artifacts: dict[str, Path], tmp_path: Path, engine_thread: type[EngineThread]
) -> None:
    with thread_server(pooling_artifacts["classify"], tmp_path, api_keys=("secret-key",)) as server:
        assert server.http.get("/server_info").status_code == 401
        response = server.http.get("/server_info", headers={"Authorization": "Bearer secret-key"})
        assert response.json()["engine"]["task"] == "classify" and response.json()["engine"]["vector_size"] == 3
        assert "secret" not in response.text and str(tmp_path.parent) not in response.text
