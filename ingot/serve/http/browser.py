"""Requests that a web page makes a browser send: refused, unless the server's options allow the page's origin."""

from starlette.datastructures import Headers

from ingot.serve.http.errors import HttpError
from ingot.serve.http.options import HttpOptions

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY_ORIGIN = "*"


def browser_error(headers: Headers, options: HttpOptions) -> HttpError | None:
    """Return the error for a request that a web page of another site has caused; None for all other requests.

    A browser sends the header Origin with a request of a page. The page's origin must be an allowed one, or that of the
    server. A page can also point its own name at 127.0.0.1 (DNS rebinding), and then has the server's origin. So a
    server without keys that listens on the loopback address also checks the header Host.
    """
    host = headers.get("host", "")
    if not options.api_keys and options.uds is None and options.host in _LOOPBACK and host:
        name = _name_of(host)
        if name not in _LOOPBACK and name not in options.allowed_hosts:
            return HttpError(403, f"the host {host[:200]!r} is not allowed; allow it with --allowed-host")
    origin = headers.get("origin")
    if origin is None or origin in options.allowed_origins or ANY_ORIGIN in options.allowed_origins:
        return None
    if origin.partition("://")[2] == host:
        return None
    return HttpError(403, f"the origin {origin[:200]!r} is not allowed; allow it with --allowed-origin")


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, without its port: "::1" of "[::1]:8000"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
