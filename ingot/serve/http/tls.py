"""TLS: the context of the server's connections, from the files that its options name."""

import ssl
from collections.abc import Callable
from pathlib import Path

from ingot.ir.errors import OptionError
from ingot.serve.http.options import HttpOptions


def tls_context(options: HttpOptions) -> ssl.SSLContext | None:
    """Return the context of TLS connections; None if the options name no certificate.

    If the options name certificates of authorities, a client must present a certificate that one of them has signed.
    Raises OptionError for a file that cannot be used, and if a key or authorities are named without a certificate.
    """
    certificate, key, authorities = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certificate is None:
        for name, path in (("--ssl-keyfile", key), ("--ssl-ca-certs", authorities)):
            if path is not None:
                raise OptionError(f"{name} without --ssl-certfile", expected="--ssl-certfile with it")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    pair = "a certificate with its chain, and its private key without a password, in PEM form"
    _load(lambda: context.load_cert_chain(certificate, key, _no_password), (certificate, key), pair)
    if authorities is not None:
        _load(lambda: context.load_verify_locations(authorities), (authorities,), "certificates in PEM form")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(load: Callable[[], None], paths: tuple[Path | None, ...], expected: str) -> None:
    """Load files into a context. Raises OptionError with their paths and what was expected."""
    try:
        load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
        where = ", ".join(str(path) for path in paths if path is not None)
        raise OptionError(f"the files of TLS cannot be used: {reason}", where=where, expected=expected) from None


def _no_password() -> str:
    """Refuse an encrypted key. OpenSSL would otherwise wait for a password at the terminal."""
    raise ValueError("the key needs a password")
