"""Sockets that a server listens on."""

import contextlib
import socket
from collections.abc import Iterator

from ingot.ir.errors import OptionError
from ingot.serve.http.options import HttpOptions

# Connections that the kernel keeps until the server accepts them: uvicorn's default, for bursts of clients.
_BACKLOG = 2048


@contextlib.contextmanager
def listening(
    options: HttpOptions, *, mode: int | None = None, hint: str = "choose another --host, --port or --uds"
) -> Iterator[socket.socket]:
    """Yield a listening socket, and remove a Unix socket's file at the end.

    mode   the permissions of a Unix socket's file; None: what the process's umask leaves
    hint   the advice in the OptionError that this raises if the address cannot be used
    """
    with contextlib.closing(_listen(options, mode, hint)) as made:
        try:
            yield made
        finally:
            if options.uds is not None:
                options.uds.unlink(missing_ok=True)


def address_of(options: HttpOptions, listening: socket.socket) -> str:
    """Return the server's address for readers of the log."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    port = listening.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'http' if options.ssl_certfile is None else 'https'}://{host}:{port}{options.root_path}"


def _listen(options: HttpOptions, mode: int | None, hint: str) -> socket.socket:
    """Return a listening socket. Raises OptionError if the address cannot be used."""
    where = str(options.uds) if options.uds is not None else f"{options.host}:{options.port}"
    try:
        if options.uds is not None:
            made = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                if options.uds.is_socket():
                    options.uds.unlink()  # of a server that was killed
            made.bind(str(options.uds))
            if mode is not None:
                options.uds.chmod(mode)  # before it listens: until then, the kernel refuses all connections
        else:
            family, kind, *_, address = socket.getaddrinfo(
                options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = socket.socket(family, kind)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        made.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        raise OptionError(f"the server cannot listen: {error}", where=where, hint=hint) from None
    return made
