"""Starting the server: a light process, quick help, errors before it listens, Unix sockets, keys."""

from __future__ import annotations

import inspect
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import HttpServer, until
from kept_records import kept_records
from thread_server import ThreadServer, thread_server

import ingot.cli.main as cli
from ingot import LLM
from ingot.serve.engine.options import ENGINE_OPTIONS

pytestmark = pytest.mark.xdist_group("serve")


def test_the_engine_takes_all_options_of_llm() -> None:
    parameters = inspect.signature(LLM.__init__).parameters.values()
    named = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    # These choose the artifact, before the engine starts.
    of_compiles = {"revision", "quantize", "tensor_parallel_size", "pipeline_parallel_size"}
    assert named - of_compiles == ENGINE_OPTIONS


def test_the_server_process_imports_no_torch() -> None:
    program = """
import sys
from ingot import AsyncLLM
from ingot.serve.http.server import serve
engine = {"torch", "numpy", "transformers", "ingot.runtime.engines.engine", "ingot.runtime.loading.loader"}
print(*sorted(engine & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_help_imports_no_server() -> None:
    """So that it is quick."""
    slow = {"fastapi", "uvicorn", "msgspec", "torch"}
    program = f"""
import sys, ingot.cli.main as cli
assert cli.run(cli.INGOT, ["serve", "--help"]) == 0
assert not {slow} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "--served-model-name" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere.ingot",), "nowhere.ingot is not there"),
        (("{artifact}", "--port", "70000"), "--port is 70000"),
        (("{artifact}", "--root-path", "models"), "--root-path"),
        (("{artifact}", "--max-queue", "0"), "--max-queue"),
        (("{artifact}", "--chat-template", "nowhere.jinja"), "nowhere.jinja"),
        (("{artifact}", "--host", "no such host"), "cannot listen"),
        (("{artifact}", "--port", "0", "--ssl-keyfile", "key.pem"), "--ssl-keyfile without --ssl-certfile"),
        (("{artifact}", "--port", "0", "--otlp-traces-endpoint", "localhost:4317"), "--otlp-traces-endpoint is"),
        (("{artifact}", "--generation-config", "nowhere"), "--generation-config is 'nowhere'"),
        (("{artifact}", "--log-format", "xml"), "--log-format"),
        (("{artifact}", "--max-num-seqs", "9", "--port", "0"), "max_num_seqs is 9"),  # found by the engine
    ],
)
@pytest.mark.usefixtures("engine_thread")
def test_bad_options(
    arguments: tuple[str, ...], text: str, chat_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [one.replace("{artifact}", str(chat_artifact)) for one in arguments]
    assert cli.run(cli.INGOT, ["serve", *given]) == cli.BAD_INPUT
    assert text in capsys.readouterr().err


def test_a_port_in_use(chat_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.run(cli.INGOT, ["serve", str(chat_artifact), "--port", port]) == cli.BAD_INPUT
    assert "cannot listen" in capsys.readouterr().err


@pytest.fixture(scope="module")
def guarded(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: object
) -> Iterator[ThreadServer]:
    """A strict server with keys, names, a template and a root path."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = {"strict": True, "access_log": True, "root_path": "/llm", "scheduling_policy": "priority"}
    keys = ("first", "second", "third", "fourth")
    named = {"api_keys": keys, "model_names": ("a", "b"), "chat_template": folder / "chat.jinja"}
    with thread_server(chat_artifact, folder, **options, **named) as running:
        yield running


def test_keys_are_needed_on_every_route_but_the_probes(guarded: ThreadServer) -> None:
    for path in ("/v1/models", "/metrics", "/load", "/version", "/openapi.json", "/nothing", "/health/../v1/models"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Bearer"},
        ):
            refused = guarded.http.get(path, headers=headers)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["code"] == "invalid_api_key" and refused.headers["x-request-id"]
    assert guarded.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
    for path in ("/health", "/ready", "/", "/ui/main.js"):
        assert guarded.http.get(path).status_code == 200
    for key in ("first", "second", "third", "fourth"):
        models = guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert [one["id"] for one in models.json()["data"]] == ["a", "b"]


def test_the_log_of_requests_shows_no_key(guarded: ThreadServer, server: HttpServer) -> None:
    line = re.compile('"GET /llm/v1/models HTTP/1.1" 200 in [0-9.]+ s, id [0-9a-f]{32}')
    with kept_records("ingot.requests", logging.INFO) as records:
        guarded.http.get("/v1/models", headers={"Authorization": "Bearer first"})
        until(lambda: any(line.search(one.getMessage()) for one in records), 10)  # it follows the answer
    text = " ".join(one.getMessage() for one in records)
    assert "Bearer" not in text and "first" not in text
    server.http.get("/v1/models")
    assert "GET /" not in server.log.read_text(), "without --access-log"


def test_a_strict_server_refuses_unknown_fields(guarded: ThreadServer) -> None:
    headers = {"Authorization": "Bearer first"}
    refused = guarded.http.post("/v1/completions", json={"prompt": "a", "temprature": 1}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Unrecognized request argument supplied: temprature"
    assert refused.json()["error"]["param"] == "temprature"


def test_priorities_with_the_policy_that_has_them(guarded: ThreadServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "priority": -3}
    made = guarded.http.post("/v1/completions", json=body, headers={"Authorization": "Bearer first"})
    assert made.status_code == 200


def test_keys_do_not_share_cached_prompts(guarded: ThreadServer) -> None:
    """The time of an answer shows no key what another has sent."""

    def cached(key: str, path: str, **fields: object) -> int:
        body = {"max_tokens": 1, **fields}
        made = guarded.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).json()
        found: int = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    for path, fields in (
        ("/v1/completions", {"prompt": "p" * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "m" * 100}]}),
    ):
        assert cached("first", path, **fields) == 0 and cached("first", path, **fields) > 50
        assert cached("second", path, **fields) == 0
        assert cached("first", path, **fields, cache_salt="a") == 0


def test_another_chat_template(guarded: ThreadServer) -> None:
    headers = {"Authorization": "Bearer first"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made = guarded.http.post("/tokenize", json={"messages": messages}, headers=headers).json()
    text = guarded.http.post("/detokenize", json={"tokens": made["tokens"]}, headers=headers).json()["prompt"]
    assert text == "[hi][ho]"


def test_request_ids(server: HttpServer) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    kept = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1" and kept.json()["id"] == "cmpl-mine-1"
    for bad in ("a b", "x" * 200):
        made = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": bad})
        assert made.headers["x-request-id"] not in (bad, "") and " " not in made.json()["id"]
    missing = server.http.get("/nowhere")
    assert missing.headers["x-request-id"] and missing.headers["x-content-type-options"] == "nosniff"


def test_an_unknown_field_is_a_warning(server: HttpServer) -> None:
    assert server.complete(max_tokens=1, frobnicate=2).status_code == 200
    assert server.complete(max_tokens=1, frobnicate=3).status_code == 200
    assert server.log.read_text().count("'frobnicate'") == 1


def test_the_schema_lists_the_routes(server: HttpServer) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= paths.keys()
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "top_k"} <= body["properties"].keys() and body["required"] == ["messages"]
    assert server.http.get("/docs").status_code == 404, "it would load scripts from elsewhere"


@pytest.mark.slow
def test_options_of_the_command(chat_artifact: Path, tmp_path: Path) -> None:
    """They reach the server: a Unix socket, keys of the command and of the environment, the log of requests."""
    options = ("--uds", tmp_path / "socket", "--api-key", "first", "--access-log", "--served-model-name", "a")
    server = HttpServer(chat_artifact, tmp_path / "log", *options, INGOT_API_KEY="third, fourth")
    try:
        assert server.http.get("/v1/models").status_code == 401
        for key in ("first", "third", "fourth"):
            models = server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert [one["id"] for one in models.json()["data"]] == ["a"]
        until(lambda: '"GET /v1/models HTTP/1.1" 200' in server.log.read_text(), 10)
        assert server.stop() == 0 and not (tmp_path / "socket").exists()
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # with an empty cache it compiles pico
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """`ingot serve` with the bundled checkpoint, and the curl line after it."""
    root = Path(__file__).parents[2]
    found = re.search(
        r"^ +ingot serve (\S+)\n +curl http://127.0.0.1:8000(\S+) -d '(.*)'$", (root / "README.md").read_text(), re.M
    )
    assert found is not None
    server = HttpServer(root / found[1], tmp_path / "log", start_seconds=800)
    try:
        # curl sends another content type with -d.
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = server.http.post(found[2], content=found[3], headers=form)
        assert answer.status_code == 200 and "return" in answer.json()["choices"][0]["text"]
        chat = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.status_code == 400 and "no chat template" in chat.json()["error"]["message"]
        assert server.stop() == 0
    finally:
        server.close()
