"""Packages that only some targets need; extras of Ingot install them."""

from importlib.util import find_spec

from ingot.ir.errors import TargetError


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def require(module: str, package: str, purpose: str) -> None:
    """Raise TargetError if `module`, which `package` of the extra "cuda" installs, is missing."""
    if not is_installed(module):
        raise TargetError(
            f"{purpose} needs the package '{package}', which is not installed",
            expected="the packages of the extra 'cuda'",
            hint="pip install 'ingot[cuda]'",
        )
