"""Start the servers that serve_http.py measures, wait until they answer, and end them."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.bench.children import ChildError

_END_SECONDS = 10.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server that runs. `seconds`: from the start of its process to its first answer."""

    process: "subprocess.Popen[bytes]"
    port: int
    seconds: float


def ingot_command(artifact: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "ingot", "serve", str(artifact), "--port", str(port), "--no-prefix-caching"]


def vllm_command(checkpoint: Path, port: int, longest: int) -> list[str]:
    module = "vllm.entrypoints.openai.api_server"
    options = ["--load-format", "dummy", "--max-model-len", str(longest), "--no-enable-prefix-caching"]
    quiet = ["--disable-uvicorn-access-log", "--served-model-name", checkpoint.name]
    return [sys.executable, "-m", module, "--model", str(checkpoint), "--port", str(port), *options, *quiet]


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, *, env: Mapping[str, str], timeout: float, log: Path
) -> Iterator[Server]:
    """Run a server inside the block, after it has answered a first completion. Its output goes to the file `log`.

    `env` extends this process's environment. Raises ChildError if the server ends, or does not answer in `timeout`
    seconds.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not _answers(port):
                if process.poll() is not None:
                    raise ChildError(f"the server ended with status {process.returncode}: see {log}")
                if time.monotonic() - begin > timeout:
                    raise ChildError(f"the server did not answer within {timeout:g} s: see {log}")
                time.sleep(0.05)
            yield Server(process, port, time.monotonic() - begin)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def model_name(port: int) -> str:
    """Return the name of the served model."""
    status, answer = ask(port, "GET", "/v1/models")
    if status != 200:
        raise ChildError(f"/v1/models answers {status}")
    return str(json.loads(answer)["data"][0]["id"])


def _answers(port: int) -> bool:
    try:
        name = model_name(port)
        body = json.dumps({"model": name, "prompt": [300, 301], "max_tokens": 1, "temperature": 0.0})
        return ask(port, "POST", "/v1/completions", body)[0] == 200
    except (OSError, ChildError, http.client.HTTPException):
        return False


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """Send one request to the server, and return the status and the body of its answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
