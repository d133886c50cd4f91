"""The options of the operators' routes."""

from dataclasses import dataclass, replace
from pathlib import Path

from ingot.ir.errors import OptionError
from ingot.serve.http.options import HttpOptions


@dataclass(frozen=True)
class AdminOptions:
    """Where operators reach the server: at a Unix socket that only its owner may open, or at a port with a key.

    uds          the path of the Unix socket; it needs no key
    host, port   the address of the port, if there is no Unix socket
    key          the key for the port
    profile_dir  the folder of profiles; None: profiles are refused
    """

    uds: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    key: str = ""
    profile_dir: Path | None = None

    @property
    def listens(self) -> bool:
        """Return whether there is a socket for operators. Without one, there are no such routes."""
        return self.uds is not None or self.port is not None

    def check(self, options: HttpOptions) -> None:
        """Raise OptionError if a port has no key of its own, or if the options contradict each other."""
        if self.uds is not None and self.port is not None:
            raise OptionError("--admin-uds and --admin-port", expected="one of them")
        if self.uds is not None and options.uds is not None and self.uds.absolute() == options.uds.absolute():
            raise OptionError("--admin-uds is --uds", expected="a socket of its own")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise OptionError(f"--admin-port is {self.port}", expected="0 to 65535")
        if self.port is not None and not self.key:
            raise OptionError(
                "--admin-port without a key",
                expected="--admin-key, or the variable INGOT_ADMIN_KEY",
                hint="or use --admin-uds, a Unix socket that only you may open",
            )
        if self.key and self.key in options.api_keys:
            raise OptionError("the key of operators is an API key too", expected="a key that no client has")
        if self.key and self.port is None:
            raise OptionError("--admin-key without --admin-port", expected="both, or --admin-uds")
        if self.profile_dir is not None and not self.listens:
            raise OptionError("--profile-dir without the operators' routes", expected="--admin-uds or --admin-port")

    def http_options(self, options: HttpOptions) -> HttpOptions:
        """Return the options of the operators' server: like those of clients, with its own address and key."""
        return replace(
            options,
            host=self.host,
            port=self.port or 0,
            uds=self.uds,
            root_path="",
            api_keys=(self.key,) if self.uds is None else (),
            allowed_origins=(),
            allowed_hosts=(),
        )
