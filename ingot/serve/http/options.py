"""The options of the HTTP server."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HttpOptions:
    """How to serve a model over HTTP.

    uds              the path of a Unix socket to listen on instead of `host` and `port`
    root_path        the prefix of all paths, if a proxy passes it on
    api_keys         keys that clients may send; without any, all requests are accepted
    allowed_origins  origins of web pages that may send requests, as "https://chat.example"; "*" for all
    allowed_hosts    further values of the header Host, if the server listens on the loopback address without keys
    model_names      names of the model for clients; the first is the one in answers
    strict           refuse requests with unknown fields, instead of logging a warning
    drain_seconds    after SIGTERM, how long running requests may take
    max_stored_responses
                     responses that the server stores for each API key, for `/v1/responses`; 0 stores none
    max_body         bytes of a request's body
    header_bytes     bytes of the headers of one request, with the URL
    read_seconds     how long a client may take to send the headers of a request, and again for its body
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    strict: bool = False
    access_log: bool = False
    drain_seconds: int = 30
    max_stored_responses: int = 1000
    max_body: int = 16 << 20
    header_bytes: int = 64 << 10
    read_seconds: float = 30.0
