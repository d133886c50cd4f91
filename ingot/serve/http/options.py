"""The options of the HTTP server."""

from dataclasses import dataclass
from pathlib import Path

from ingot.serve.http.busy_polling import BusyPoll
from ingot.serve.logs import LogFormat


@dataclass(frozen=True)
class HttpOptions:
    """How to serve a model over HTTP.

    uds              the path of a Unix socket to listen on instead of `host` and `port`
    root_path        the prefix of all paths, if a proxy passes it on
    api_keys         keys that clients may send; without any, all requests are accepted
    allowed_origins  origins of web pages that may send requests, as "https://chat.example"; "*" for all
    allowed_hosts    further values of the header Host, if the server listens on the loopback address without keys
    model_names      names of the model for clients; the first is the one in answers
    ssl_certfile     a certificate in PEM form, for TLS; None: plain HTTP
    ssl_keyfile      its private key; None: it is in the same file
    ssl_ca_certs     certificates of authorities: a client must then present a certificate of its own
    access_log       log each request at its end
    log_format       of all logs, also those of the engine's process: lines of text or of JSON
    otlp_traces_endpoint
                     the URL of a collector that takes spans by OTLP over HTTP; None: no spans
    adapter_dir      the folder below which clients may load LoRA adapters; None: they may not
    ui               serve the page at `/`
    strict           refuse requests with unknown fields, instead of logging a warning
    tool_call_parser
                     the format of the model's tool calls: a name of `ingot.serve.parsers.choice`, "none", or "auto" to
                     choose by the chat template
    reasoning_parser the format of its reasoning, likewise
    drain_seconds    after SIGTERM, how long running requests may take
    max_stored_responses
                     responses that the server stores for each API key, for `/v1/responses`; 0 stores none
    max_body         bytes of a request's body
    header_bytes     bytes of the headers of one request, with the URL
    busy_poll        whether the server polls its sockets while requests run, as in `BusyPolling`
    read_seconds     how long a client may take to send the headers of a request, and again for its body
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    root_path: str = ""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None
    adapter_dir: Path | None = None
    ui: bool = True
    strict: bool = False
    access_log: bool = False
    log_format: LogFormat = "text"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    drain_seconds: int = 30
    max_stored_responses: int = 1000
    max_body: int = 16 << 20
    header_bytes: int = 64 << 10
    read_seconds: float = 30.0
    busy_poll: BusyPoll = "auto"
