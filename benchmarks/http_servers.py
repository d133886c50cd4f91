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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_child import KEPT_BACK
from sglang_child import SETTINGS as SGLANG_SETTINGS
from vllm_child import SETTINGS as VLLM_SETTINGS

from ingot.bench.children import ChildError, in_seconds

_END_SECONDS = 10.0
_IDLE_SECONDS = 20.0  # that a server may take to drop requests whose clients have gone
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server that runs. `seconds` is from the start of its process `pid` to its first answer."""

    port: int
    seconds: float
    pid: int


@dataclass(frozen=True)
class Served:
    """The model of a server: an artifact for Ingot, a checkpoint for other servers.

    `longest` is the most tokens of a sequence. `load_format` is "auto" to read the weights, or "dummy" to make some up.
    """

    artifact: Path
    checkpoint: Path | None
    longest: int
    load_format: str = "auto"


@dataclass(frozen=True)
class Kind:
    """A kind of server.

    command   returns the command line, from what it serves and the port
    settings  environment variables to set
    busy      names of gauges in /metrics that count running and waiting requests
    abort     a path and a body that end all requests, for a server whose gauges are not up to date; or None
    """

    command: Callable[[Served, int], Sequence[str]]
    settings: Mapping[str, str]
    busy: tuple[str, ...]
    abort: tuple[str, str] | None = None


def ingot_command(model: Path, port: int, *, caching: bool = False) -> list[str]:
    """Return the command of Ingot's server. `caching` turns on the prefix cache."""
    command = [sys.executable, "-m", "ingot", "serve", str(model), "--port", str(port)]
    return command if caching else [*command, "--no-prefix-caching"]


def vllm_command(served: Served, port: int) -> list[str]:
    """Return the command of vLLM's server (entrypoints/openai/cli_args.py of 0.25.1)."""
    checkpoint = _checkpoint(served)
    module = "vllm.entrypoints.openai.api_server"
    options = ["--load-format", served.load_format, "--max-model-len", str(served.longest)]
    quiet = ["--disable-uvicorn-access-log", "--served-model-name", checkpoint.name, "--no-enable-prefix-caching"]
    return [sys.executable, "-m", module, "--model", str(checkpoint), "--port", str(port), *options, *quiet]


def sglang_command(served: Served, port: int) -> list[str]:
    """Return the command of SGLang's server (srt/server_args.py of 0.5.17)."""
    checkpoint = _checkpoint(served)
    options = ["--load-format", served.load_format, "--context-length", str(served.longest + KEPT_BACK)]
    quiet = ["--log-level", "warning", "--served-model-name", checkpoint.name, "--disable-radix-cache"]
    sampler = ["--sampling-backend", "pytorch"]  # FlashInfer's would first compile itself with nvcc
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    return [*start, "--host", HOST, "--port", str(port), *options, *quiet, *sampler]


def _checkpoint(served: Served) -> Path:
    if served.checkpoint is None:
        raise ChildError("other servers need --checkpoint")
    return served.checkpoint.resolve()


_VLLM_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
KINDS = {
    "ingot": Kind(lambda served, port: ingot_command(served.artifact, port), {}, _VLLM_BUSY),
    "vllm": Kind(vllm_command, VLLM_SETTINGS, _VLLM_BUSY),
    "sglang": Kind(sglang_command, SGLANG_SETTINGS, (), ("/abort_request", '{"abort_all": true}')),
}


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
                    raise ChildError(f"the server ended with status {process.returncode}: see {log.name}")
                if time.monotonic() - begin > timeout:
                    raise ChildError(f"the server did not answer within {in_seconds(timeout)}: see {log.name}")
                time.sleep(0.05)
            yield Server(port, time.monotonic() - begin, process.pid)
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


def wait_until_idle(kind: Kind, port: int) -> None:
    """Wait until the server runs no request, after clients have closed their connections.

    Each look follows a request of one token, because a server updates its gauges when it runs a step. Raises ChildError
    if it still runs requests after a while.
    """
    if kind.abort is not None:
        path, body = kind.abort
        ask(port, "POST", path, body)
    begin = time.monotonic()
    while time.monotonic() < begin + _IDLE_SECONDS:
        if _answers(port) and not any(gauges(port, kind.busy)):
            return
        time.sleep(0.1)
    raise ChildError(f"the server still runs requests {_IDLE_SECONDS:g} s after their clients have gone")


def gauges(port: int, names: Sequence[str]) -> list[float]:
    """Return the values of gauges in /metrics, one for each sample."""
    if not names:
        return []
    status, text = ask(port, "GET", "/metrics")
    if status != 200:
        raise ChildError(f"/metrics answers {status}")
    lines = [line for line in text.decode().splitlines() if line.partition("{")[0] in names]
    return [float(line.rpartition(" ")[2]) for line in lines]


def _answers(port: int) -> bool:
    """Return whether the server answers a request of one token."""
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
