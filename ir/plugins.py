"""Ops, weight formats, passes, backends and parsers from other installed packages, found by their entry points.

A package names them in its pyproject.toml:

    [project.entry-points."ingot.ops"]
    my_ops = "my_package.ops"                  # a module that defines ops or weight formats when it is imported

    [project.entry-points."ingot.passes"]
    my-pass = "my_package.passes:MyPass"       # a Pass; `joins` names its phase

    [project.entry-points."ingot.backends"]
    my_backend = "my_package:BACKEND"          # an `ingot.backends.outside.PackageBackend`; its import is light

    [project.entry-points."ingot.tool_parsers"]
    my-format = "my_package.parser:make"       # makes an `ingot.serve.parsers.events.Parser` for the tools of a request

    [project.entry-points."ingot.reasoning_parsers"]
    my-format = "my_package.reasoning:make"    # likewise, for the text of a prompt
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from ingot.ir.errors import OptionError

OPS_GROUP = "ingot.ops"
PASSES_GROUP = "ingot.passes"
BACKENDS_GROUP = "ingot.backends"
TOOL_PARSERS_GROUP = "ingot.tool_parsers"
REASONING_PARSERS_GROUP = "ingot.reasoning_parsers"


def _load(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:  # code of another package may raise anything: name the package
        raise OptionError(
            f"the entry point '{entry.name}' of '{entry.group}' does not load: {type(error).__name__}: {error}",
            where=entry.value,
            hint=f"fix or remove the package '{entry.dist.name if entry.dist else '?'}'",
        ) from error


@lru_cache(maxsize=1)
def load_user_ops() -> tuple[str, ...]:
    """Import the modules of other packages that define ops or weight formats. Each is imported once.

    A package names them by entry points in the group `ingot.ops`. Return the names of the entry points. Raises
    OptionError if a module does not load.
    """
    found = sorted(entry_points(group=OPS_GROUP), key=lambda entry: entry.name)
    for entry in found:
        _load(entry)
    return tuple(entry.name for entry in found)


def user_pass_names() -> tuple[str, ...]:
    """Return the names of the passes of other packages, without importing them.

    A package names its passes by entry points in the group `ingot.passes`.
    """
    return tuple(sorted({entry.name for entry in entry_points(group=PASSES_GROUP)}))


def load_user_pass(name: str) -> object | None:
    """Import the pass `name` from another package, by its entry point in the group `ingot.passes`.

    None if no package has such a pass. Raises OptionError if it does not load, or if two packages define the name.
    """
    return _load_one(PASSES_GROUP, name, "pass")


@dataclass(frozen=True)
class Package:
    """An installed package, as pip knows it: its name and version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def package_of(entry: EntryPoint) -> Package:
    """Return the package that has an entry point."""
    return Package(entry.dist.name, entry.dist.version) if entry.dist else Package("?", "?")


def user_backends() -> dict[str, list[EntryPoint]]:
    """Return the entry points of the backends of other packages by the backend's name, without importing them.

    A package names its backends by entry points in the group `ingot.backends`. A name with several entry points is
    defined by several packages.
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in sorted(entry_points(group=BACKENDS_GROUP), key=lambda entry: (entry.name, entry.value)):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {name: list(entries.values()) for name, entries in found.items()}


def user_parser_names(group: str) -> tuple[str, ...]:
    """Return the names of the parsers of other packages in an entry points group, without importing them."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load_user_parser(group: str, name: str) -> object | None:
    """Import the parser `name` from another package, by its entry point in `group`. Errors as `load_user_pass`."""
    return _load_one(group, name, "parser")


def _load_one(group: str, name: str, kind: str) -> object | None:
    found = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if len(found) > 1:
        raise OptionError(
            f"two packages define a {kind} '{name}'", where=", ".join(sorted(found)), hint="remove one of the packages"
        )
    return _load(next(iter(found.values()))) if found else None
