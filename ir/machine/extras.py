"""Checks for Python packages that only some targets need, such as those of the extra `ingot[cuda]`."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ingot.ir.errors import TargetError


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def installed_version(package: str) -> str:
    """Return the version of an installed package, as pip names it; "" if it is not installed."""
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):  # ValueError: a name that no package can have
        return ""


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed."""
    return {name: found for name in packages if (found := installed_version(name))}


def require(module: str, package: str, purpose: str, extra: str = "cuda") -> None:
    """Raise TargetError if the Python module `module` is not installed.

    `package` is the package with the module, which `ingot[EXTRA]` installs. `purpose` says for the message what needs
    it.
    """
    if not is_installed(module):
        raise TargetError(
            f"{purpose} needs the package '{package}', which is not installed",
            expected=f"the packages of the extra '{extra}'",
            hint=f"pip install 'ingot[{extra}]'",
        )
