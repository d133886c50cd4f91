"""The application in Ray Serve, with two replicas on cores: answers, affinity, clients that leave, a dead replica."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from http_server import until

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]


@pytest.fixture(scope="module")
def client(chat_artifact: Path) -> Iterator[httpx.Client]:
    import ray
    from ray import serve

    from ingot.serve.ray.app import RayArguments, build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        # As `serve run` gives them: all values are texts.
        arguments = RayArguments.model_validate({"model": str(chat_artifact), "replicas": "2", "gpus": "0"})
        serve.run(build(arguments), name="tiny")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def test_answers(client: httpx.Client, chat_artifact: Path) -> None:
    from ingot import LLM, SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (expected,) = LLM(chat_artifact).generate(["def f"], params)
    fields = {"prompt": "def f", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=fields)
    assert answer.json()["choices"][0]["text"] == expected.outputs[0].text and answer.headers["x-request-id"]
    with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert stream.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.get("/nothing").json()["error"]["code"] is None


def test_conversations_find_their_pages(client: httpx.Client) -> None:
    for name in "abcd":
        prompt = name * 200
        for turn in range(3):
            fields = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            usage = client.post("/v1/completions", json=fields).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0 if turn == 0 else cached >= len(prompt) - 100 - 40, (name, turn)
            prompt += "." * 100


def test_a_client_that_leaves_ends_its_request(client: httpx.Client) -> None:
    fields = {"prompt": "go", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=fields) as stream:
        assert next(stream.iter_lines()).startswith("data: ")
    # Each of these requests goes to one of the replicas.
    until(lambda: all(client.get("/load").json()["server_load"] == 0 for _ in range(12)), 20)


def replica_processes() -> list[int]:
    """The processes of the model's replicas, which Ray names."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ServeReplica:tiny:ModelReplica" in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def test_a_replica_that_dies(client: httpx.Client) -> None:
    """Requests that had not begun are answered by the other one, and Ray starts a new one."""
    fields = {"max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(client.post, "/v1/completions", json={**fields, "prompt": f"{n}"}) for n in range(8)]
        until(lambda: client.get("/load").json()["server_load"] >= 3, 20)
        before = replica_processes()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        assert [one.result().status_code for one in sent] == [200] * 8
    until(lambda: len(replica_processes()) == 2, 120, 0.5)
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_the_examples_of_the_page() -> None:
    from ingot.serve.ray.app import RayArguments

    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text()
    (config,) = re.findall(r"^```yaml\n(applications:\n.*?)```", page, re.M | re.S)
    (application,) = yaml.safe_load(config)["applications"]
    (given,) = re.findall(r"^    serve run (\S+) (.*)$", page, re.M)
    assert given[0] == application["import_path"] == f"{RayArguments.__module__}:build"
    for arguments in (application["args"], dict(one.split("=") for one in given[1].split())):
        assert RayArguments.model_validate(arguments).replicas == 2
    with pytest.raises(ValueError, match="repliks"):
        RayArguments.model_validate({"model": "m", "repliks": "2"})
