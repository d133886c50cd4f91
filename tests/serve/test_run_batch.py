"""`ingot run-batch`: answers in order, bad lines as errors, a whole file or none, an engine that dies."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from http_server import until
from scripted_chat import TOOLS_TEMPLATE
from thread_server import EngineThread

from ingot import AsyncLLM
from ingot.cli.main import BAD_INPUT, DONE, INGOT, INTERRUPTED, run
from ingot.ir.errors import OutputError
from ingot.serve.batch import lines
from ingot.serve.batch.output_file import OutputFile
from ingot.serve.batch.runner import run_batch
from ingot.serve.http.options import HttpOptions

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.usefixtures("engine_thread")]


def request(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def completion(name: str, **body: Any) -> dict[str, Any]:
    return request(name, "/v1/completions", **{"prompt": "go", "temperature": 0, "max_tokens": 4, **body})


def batch(folder: Path, model: Path, content: list[Any], *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command. `content` has requests, or lines as bytes. Returns the exit code and the output's lines."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in content))
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(model), *options]
    code = run(INGOT, arguments)
    assert sorted(one.name for one in folder.iterdir()) == (["in.jsonl", "out.jsonl"] if code == DONE else ["in.jsonl"])
    return code, [json.loads(line) for line in target.read_bytes().splitlines()] if code == DONE else []


def test_answers_come_in_the_order_of_the_requests(
    chat_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [60, 3, 1, 9, 2, 30]
    content: list[Any] = [completion(f"r{index}", max_tokens=most) for index, most in enumerate(lengths)]
    content += [
        b"",
        request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2),
    ]
    content += [request("ids", "/tokenize", prompt="a\nb")]
    content += [request("response", "/v1/responses", input="a", max_output_tokens=16)]
    code, answers = batch(tmp_path, chat_artifact, content, "--served-model-name", "tiny")
    assert code == DONE and "9 answers, 0 errors" in capsys.readouterr().out
    assert [one["custom_id"] for one in answers] == [*(f"r{index}" for index in range(6)), "chat", "ids", "response"]
    for one in answers:
        assert one["error"] is None and one["response"]["status_code"] == 200 and one["id"].startswith("batch_req_")
    assert len({one["id"] for one in answers}) == len({one["response"]["request_id"] for one in answers}) == 9
    bodies = [one["response"]["body"] for one in answers]
    assert [one["usage"]["completion_tokens"] for one in bodies[:6]] == lengths
    assert bodies[0]["id"] == f"cmpl-{answers[0]['response']['request_id']}" and bodies[0]["model"] == "tiny"
    assert bodies[6]["choices"][0]["message"]["role"] == "assistant" and bodies[7]["count"] == 3
    assert bodies[8]["object"] == "response" and bodies[8]["status"] in ("completed", "incomplete")


def test_calls_that_a_line_forces(chat_artifact: Path, tmp_path: Path) -> None:
    template, folder = tmp_path / "chat.jinja", tmp_path / "files"
    template.write_text(TOOLS_TEMPLATE)
    folder.mkdir()
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "parallel_tool_calls": False}
    content = [
        request("good", "/v1/chat/completions", **chat, tools=tools, tool_choice="required"),
        request("bad", "/v1/chat/completions", **chat, tool_choice="required"),
    ]
    code, (good, bad) = batch(folder, chat_artifact, content, "--chat-template", str(template))
    (call,) = good["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert code == DONE and (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {})
    assert bad["response"]["status_code"] == 400 and "send tools" in bad["response"]["body"]["error"]["message"]


BAD: list[tuple[Any, str]] = [
    (b"no json", "no JSON"),
    (b"\xff\xfe", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    (b"[]", "expected: an object"),
    ({}, "custom_id"),
    ({"custom_id": 3}, "custom_id"),
    ({**completion("a"), "method": "GET"}, "method"),
    ({**completion("a"), "url": "http://elsewhere/v1/completions"}, "url"),
    ({**completion("a"), "url": "//elsewhere/v1"}, ""),
    ({**completion("a"), "url": "/v1/completions?a=b"}, "url"),
    ({**completion("a"), "url": 3}, "url"),
    ({**completion("a"), "body": [1]}, "body"),
    (completion("a", stream=True), "stream"),
    (completion("first"), "that of line 1"),
    (b'{"custom_id": "' + b"x" * 300 + b'"}', "longer than 200 bytes"),
]
HTTP_BAD: list[tuple[dict[str, Any], int, str]] = [
    (completion("a", prompt=3), 400, "prompt"),
    (completion("a", n=10**9), 400, "n"),
    (completion("a", model="other"), 404, "other"),
    (request("a", "/v1/nothing"), 404, "no route"),
    (request("a", "/metrics"), 405, "POST"),
    (request("a", "/pause"), 404, "no route"),
    (request("a", "/v1/embeddings", input="a"), 400, "no vectors"),
]


def test_bad_lines_become_errors(chat_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    bad = [one if one != b"[" * 100_000 else b"[" * 199 for one, _ in BAD]
    named = [{**one, "custom_id": f"h{index}"} for index, (one, _, _) in enumerate(HTTP_BAD)]
    code, answers = batch(tmp_path, chat_artifact, [completion("first"), *bad, *named, completion("last")])
    assert code == DONE and len(answers) == 2 + len(BAD) + len(HTTP_BAD)
    assert answers[0]["response"]["status_code"] == answers[-1]["response"]["status_code"] == 200
    for number, ((line, said), one) in enumerate(zip(BAD, answers[1:], strict=False), 2):
        if isinstance(line, dict) and str(line.get("url")).startswith("//"):
            assert one["response"]["status_code"] == 404
            continue
        assert one["response"] is None and one["error"]["code"] == "invalid_request"
        assert one["error"]["message"].startswith(f"line {number}: ") and said in one["error"]["message"]
    for (_, status, said), one in zip(HTTP_BAD, answers[1 + len(BAD) :], strict=False):
        assert one["error"] is None and one["response"]["status_code"] == status
        assert said in one["response"]["body"]["error"]["message"]


def test_vectors(pooling_artifacts: dict[str, Path], tmp_path: Path) -> None:
    content = [request("a", "/v1/embeddings", input=["x", "y"]), request("b", "/score", text_1="x", text_2="x")]
    code, (vectors, score) = batch(tmp_path, pooling_artifacts["embed"], content)
    assert code == DONE and len(vectors["response"]["body"]["data"]) == 2
    assert abs(score["response"]["body"]["data"][0]["score"] - 1) < 1e-6


@pytest.mark.slow
def test_more_inputs_than_a_server_queues(pooling_artifacts: dict[str, Path], tmp_path: Path) -> None:
    content = [request(str(index), "/v1/embeddings", input=["x"] * 1000) for index in range(6)]
    code, answers = batch(tmp_path, pooling_artifacts["embed"], content)
    assert code == DONE and [one["response"]["status_code"] for one in answers] == [200] * 6


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("https://elsewhere/in.jsonl", "out.jsonl", "local file"),
        ("in.jsonl", "s3://elsewhere/out.jsonl", "local file"),
        ("missing.jsonl", "out.jsonl", "no file"),
        (".", "out.jsonl", "no file"),
        ("in.jsonl", "in.jsonl", "another file"),
        ("in.jsonl", "missing/out.jsonl", "a name in a folder"),
        ("in.jsonl", ".", "a name in a folder"),
    ],
)
def test_files_that_are_refused(
    source: str, target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("")
    assert run(INGOT, ["run-batch", "-i", source, "-o", target, "--model", "missing.ingot"]) == BAD_INPUT
    assert said in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_output_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), OutputFile(target) as output:
        output.write(b"{}")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"before" and [*tmp_path.iterdir()] == [target]
    with OutputFile(target) as output:
        output.write(b"{}")
        assert target.read_bytes() == b"before"
    assert target.read_bytes() == b"{}\n" and [*tmp_path.iterdir()] == [target]
    with pytest.raises(OutputError, match="cannot be written"), OutputFile(Path("/dev/full/out.jsonl")):
        pass


def test_requests_are_tried_again_when_the_engine_dies(
    chat_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    content = [completion(str(index), max_tokens=100, ignore_eos=True) for index in range(3)]
    source.write_text("\n".join(map(json.dumps, content)))
    llm = AsyncLLM(chat_artifact)

    async def body() -> Any:
        running = asyncio.create_task(run_batch(llm, HttpOptions(("tiny",)), source, target))
        while not llm.engine.stats.running:
            await asyncio.sleep(0.005)
        EngineThread.started[-1].kill()
        return await running

    counts = asyncio.run(body())
    assert llm.engine.restarts == 1 and (counts.answered, counts.failed) == (3, 0)
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_part_of_an_output(chat_artifact: Path, tmp_path: Path, number: int) -> None:
    content = [completion(str(index), max_tokens=4000, ignore_eos=True) for index in range(30)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, content)))
    command = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", str(chat_artifact)]
    with subprocess.Popen(
        [sys.executable, "-m", "ingot", *command], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: len([*tmp_path.iterdir()]) == 2, 60)
        time.sleep(5)  # the engine starts, or runs requests
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(20) == INTERRUPTED
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]
