"""HTTPS: with a certificate, with certificates of clients, and with files that cannot be used."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from http_server import HttpServer
from thread_server import ThreadServer, thread_server

from ingot.ir.errors import OptionError
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.tls import tls_context

pytestmark = pytest.mark.xdist_group("serve")


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of 127.0.0.1 and its key, each as NAME.pem and NAME.key: "server" and "client"."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        made = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2)
        names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl("req", *made, *names, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def server(
    chat_artifact: Path, files: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: object
) -> Iterator[ThreadServer]:
    """A server that requires a certificate of its clients."""
    named = {"ssl_certfile": files / "server.pem", "ssl_keyfile": files / "server.key"}
    folder = tmp_path_factory.mktemp("server")
    with thread_server(chat_artifact, folder, tcp=True, **named, ssl_ca_certs=files / "client.pem") as running:
        yield running


def client_of(server: ThreadServer, files: Path, certificate: str | None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(files / "server.pem"))
    if certificate is not None:
        context.load_cert_chain(files / f"{certificate}.pem", files / f"{certificate}.key")
    return httpx.Client(base_url=server.url.replace("http:", "https:"), verify=context)


def test_a_request_over_tls(server: ThreadServer, files: Path) -> None:
    with client_of(server, files, "client") as client:
        made = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
        assert made.status_code == 200 and made.text.endswith("data: [DONE]\n\n")
        assert client.get("/", headers={"Origin": server.url.replace("http:", "https:")}).status_code == 200
        assert client.get("/v1/models", headers={"X": "x" * (1 << 17)}).status_code == 431


@pytest.mark.parametrize("certificate", [None, "server"])
def test_a_client_without_a_certificate_of_the_authority(
    server: ThreadServer, files: Path, certificate: str | None
) -> None:
    with client_of(server, files, certificate) as client, pytest.raises(httpx.TransportError):
        client.get("/health")
    with client_of(server, files, "client") as client:
        assert client.get("/health").status_code == 200


def test_plain_http_and_old_protocols_are_refused(server: ThreadServer, files: Path) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    context = tls_context(HttpOptions(("a",), ssl_certfile=files / "server.pem", ssl_keyfile=files / "server.key"))
    assert context is not None and context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE and tls_context(HttpOptions(("a",))) is None


def test_a_key_in_the_file_of_the_certificate(files: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((files / "server.pem").read_bytes() + (files / "server.key").read_bytes())
    assert tls_context(HttpOptions(("a",), ssl_certfile=both)) is not None


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ({"ssl_keyfile": "server.key"}, "--ssl-keyfile without --ssl-certfile"),
        ({"ssl_ca_certs": "client.pem"}, "--ssl-ca-certs without --ssl-certfile"),
        ({"ssl_certfile": "nothing.pem"}, "nothing.pem"),
        ({"ssl_certfile": "server.pem"}, "server.pem"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "client.key"}, "KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key"}, "the key needs a password"),
        ({"ssl_certfile": "text", "ssl_keyfile": "server.key"}, "text"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "text"}, "text"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "none"}, "none"),
    ],
)
def test_files_that_cannot_be_used(files: Path, names: dict[str, str], complaint: str) -> None:
    (files / "text").write_text("no certificate")
    if not (files / "locked.key").exists():
        openssl("ec", "-in", files / "server.key", "-aes256", "-passout", "pass:word", "-out", files / "locked.key")
    with pytest.raises(OptionError) as raised:
        tls_context(HttpOptions(("a",), **{name: files / file for name, file in names.items()}))  # type: ignore[arg-type]
    assert complaint in str(raised.value)


@pytest.mark.slow
def test_a_service(chat_artifact: Path, files: Path, tmp_path: Path) -> None:
    """A file with options, TLS and lines of JSON, in processes of their own."""
    options = {
        "ssl-certfile": str(files / "server.pem"),
        "ssl_keyfile": str(files / "server.key"),
        "log-format": "json",
        "access-log": True,
        "served-model-name": ["a", "b"],
        "generation-config": "none",
        "no-ui": True,
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(options))
    server = HttpServer(chat_artifact, tmp_path / "log", "--config", tmp_path / "serve.yaml", INGOT_API_KEY="key")
    try:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(files / "server.pem"))
        with httpx.Client(base_url=server.url, verify=context, headers={"Authorization": "Bearer key"}) as client:
            assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b"]
            assert client.get("/").status_code == 404
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert server.stop() == 0
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [one["status"] for one in lines if one["logger"] == "ingot.requests"] == [200, 404, 200]
    finally:
        server.close()
