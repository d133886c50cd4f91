"""Checks for Python packages that only some targets need, such as those of the extra `ingot[cuda]`."""

from importlib.util import find_spec

from ingot.ir.errors import TargetError


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def require(module: str, package: str, purpose: str) -> None:
    """Raise TargetError if the Python module `module` is not installed.

    `package` is the package with the module, such as one that `ingot[cuda]` installs. `purpose` says for the message
    what needs it.
    """
    if not is_installed(module):
        raise TargetError(
            f"{purpose} needs the package '{package}', which is not installed",
            expected="the packages of the extra 'cuda'",
            hint="pip install 'ingot[cuda]'",
        )
