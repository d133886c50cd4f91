"""A Hugging Face hub in this process: what the client asks of one, over HTTP, and ways in which it can fail.

The addresses and headers are those that huggingface_hub reads (file_download.py, hf_api.py, utils/_http.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_fetcher import fetch_in_new_process

TOKEN = "hf_of_the_test"
LARGE = 1_000_000

# The files of a checkpoint, by their names alone: what is in them is never read.
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
SMALL = {
    "config.json": CONFIG,
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"[]",
}
WHOLE = {**SMALL, "model.safetensors": b"w" * 3_000_000}


@dataclass
class Repository:
    """Commits by their hashes, and what branches and tags stand for. `private` and `gated` ask for TOKEN.

    Files from LARGE bytes on lie in another place, to which the hub redirects. `broken` are files whose download ends
    in the middle, `stalled` those where it stops there; `sizes` are false ones that are listed. When the files were
    listed, main moves on to the commit `moves_to`. `status` is what every question is answered with, if any.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    broken: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    moves_to: str = ""
    status: int = 0

    def commit(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """A new commit of these files, to which the branch moves."""
        made = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[made] = dict(files)
        self.revisions[revision] = made
        return made


@dataclass
class Hub:
    """The repositories of a hub that runs, and what was asked: "GET file" and "HEAD file", or "LIST org/name"."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    closing: Event = field(default_factory=Event)

    def add(self, name: str, folder: Path | Mapping[str, bytes]) -> Repository:
        """A repository with one commit, of a folder's files."""
        files = folder if isinstance(folder, Mapping) else {one.name: one.read_bytes() for one in folder.iterdir()}
        made = self.repositories[name] = Repository()
        made.commit(files)
        return made

    def fetched(self) -> list[str]:
        """The files that were downloaded."""
        return sorted(one.removeprefix("GET ") for one in self.asked if one.startswith("GET "))


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a port of this machine, until the block ends."""

    class Handler(_Handler):
        hub: Hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = Handler.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
                self._tree("/".join(parts[2:4]), parts[5])
            elif parts[:2] == ["api", "models"]:
                self._list("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
            elif parts[0] == "elsewhere":
                self._elsewhere("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
            else:
                if parts[2:3] != ["resolve"]:
                    raise _Refusal(404)
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        except _Refusal as refusal:
            self._send(refusal.status, b"", {key: value for key, value in refusal.headers.items() if value})

    def _repository(self, name: str) -> Repository:
        known = f"Bearer {TOKEN}" == self.headers.get("Authorization")
        found = self.hub.repositories.get(name)
        if found is not None and found.status:
            raise _Refusal(found.status)
        if found is None or (found.private and not known):
            # To a stranger a private repository and none look alike.
            raise _Refusal(404 if known else 401, "RepoNotFound", "Repository not found")
        return found

    def _commit(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _list(self, name: str, revision: str) -> None:
        self.hub.asked.append(f"LIST {name}")
        repository = self._repository(name)
        commit, files = self._commit(repository, revision)
        siblings = [
            {"rfilename": file, "size": repository.sizes.get(file, len(data)), "blobId": _git(data), **_large(data)}
            for file, data in files.items()
        ]
        answer = {"id": name, "modelId": name, "sha": commit, "tags": [], "siblings": siblings}
        if repository.moves_to:
            repository.revisions["main"] = repository.moves_to
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _tree(self, name: str, revision: str) -> None:
        _, files = self._commit(self._repository(name), revision)
        tree = [
            {"type": "file", "path": file, "oid": _git(data), "size": len(data), **_large(data)}
            for file, data in files.items()
        ]
        self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str) -> None:
        self.hub.asked.append(f"{self.command} {file}")
        repository = self._repository(name)
        if repository.gated and f"Bearer {TOKEN}" != self.headers.get("Authorization"):
            message = f"Access to model {name} is restricted. You must be authenticated to access it."
            raise _Refusal(403 if "Authorization" in self.headers else 401, "GatedRepo", message)
        commit, files = self._commit(repository, revision)
        if file not in files:
            raise _Refusal(404, "EntryNotFound", "Entry not found", commit)
        data = files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git(data)}"'}
        if len(data) < LARGE:
            self._bytes(repository, file, data, headers)
            return
        # To another host, which gets no token.
        place = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/elsewhere/{name}/{commit}/{file}"
        linked = {"X-Linked-ETag": f'"{_large(data)["lfs"]["sha256"]}"', "X-Linked-Size": str(len(data))}
        self._send(302, b"", {**headers, **linked, "Location": place})

    def _elsewhere(self, name: str, commit: str, file: str) -> None:
        self.hub.asked.append(f"{self.command} {file}")
        assert "Authorization" not in self.headers, "a token was sent to another host"
        repository = self.hub.repositories[name]
        self._bytes(repository, file, repository.commits[commit][file], {})

    def _bytes(self, repository: Repository, file: str, data: bytes, headers: Mapping[str, str]) -> None:
        headers, status = {**headers, "Accept-Ranges": "bytes"}, 200
        if (asked := self.headers.get("Range")) is not None:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        cut = self.command == "GET" and file in repository.broken | repository.stalled
        self._send(status, data, headers, cut=cut)
        if cut and file in repository.stalled:
            self.wfile.flush()
            self.hub.closing.wait()

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True


def _git(data: bytes) -> str:
    """What git names such a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _large(data: bytes) -> dict[str, Any]:
    """What the hub lists besides of a file that it keeps elsewhere."""
    if len(data) < LARGE:
        return {}
    digest = hashlib.sha256(data).hexdigest()
    return {"lfs": {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 134}}


@dataclass(frozen=True)
class Client:
    """Runs Python and commands in processes that see the hub alone, with a cache of their own.

    Processes, because the client of the hub reads its environment when it is imported.
    """

    folder: Path
    url: str

    @property
    def cache(self) -> Path:
        return self.folder / "hf" / "hub"

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        here = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "3",
            "INGOT_CACHE": str(self.folder / "cache"),
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return {**inherited, **here, **more}

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=240,
        )

    def start(self, *command: object) -> subprocess.Popen[str]:
        """A process that goes on meanwhile, with pipes for what it prints."""
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where a shell started the tests with `&`, they ignore an interrupt, and so would this process.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def fetch(self, name: str, revision: str | None = None, **environment: str) -> Any:
        """What fetching a checkpoint gives: "folder", "origin" and "progress", or "error"."""
        return fetch_in_new_process(self.folder, self.environment(**environment), name, revision)
