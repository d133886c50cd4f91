"""Backends of other packages: what a package states about one, and the loading of its code at run time.

A package names a `PackageBackend` by an entry point in the group `ingot.backends`:

    # my_package/__init__.py
    BACKEND = PackageBackend(emit={"cpu": "my_package.emit:MyBackend"}, executable="my_package.load:load")

Serving imports this object and the load side. `ingot.compile.outside_backend` guards the compile side. Whatever the
code of a package raises or returns wrongly becomes a UserBackendError that names the package.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.backends.entry import BackendEntry
from ingot.ir.artifact.plan import REFERENCES
from ingot.ir.errors import UserBackendError
from ingot.ir.plugins import Package, package_of, user_backends

if TYPE_CHECKING:
    import torch

    from ingot.ir.artifact.plan import Executable
    from ingot.ir.machine.load_context import LoadContext

DEVICES = ("cpu", "cuda")
# A name that the text form of programs, the option --backend and file names can all hold.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Backends that compete with one of another package that `--backend` names, so that every op is computed.
_OTHERS = {"cpu": REFERENCES, "cuda": ("triton", *REFERENCES)}


@dataclass(frozen=True)
class PackageBackend:
    """The description of a backend in another package. All code is named as text, "MODULE:NAME", and imported late.

    - `emit`: by device ("cpu" or "cuda"), the class of the compile side. It is made without arguments, and implements
      `ingot.ir.backend.Backend` and the protocols derived from it that fit.
    - `executable`: the function `(executable, directory, context)` that loads compiled code. It returns a function of
      the input tensors that returns a list of new tensors. "" if the backend compiles no executables.
    - `library`: the function `(executable, directory, context)` that loads a kernel library, and returns the functions
      of ops by name; "" if the backend has no library.
    - `find_op`: the function that returns the function of an op, such as "ingot.linear", or None; "" if there is none.
    - `links`: further packages that must have the same version where the artifact runs.
    - `on_request`: the backend competes only if `--backend` names it.
    """

    emit: Mapping[str, str]
    executable: str = ""
    library: str = ""
    find_op: str = ""
    links: tuple[str, ...] = field(default=())
    on_request: bool = False


@dataclass(frozen=True)
class Owner:
    """A backend of another package: its name and package, for messages."""

    backend: str
    package: Package

    def error(
        self, did: str, *, where: str = "", expected: str = "", hint: str = "fix the package"
    ) -> UserBackendError:
        """Return the error that says what the backend did."""
        return UserBackendError(
            f"the backend '{self.backend}' of the package {self.package} {did}",
            where=where,
            expected=expected,
            hint=hint,
            backend=self.backend,
        )

    def raised(self, doing: str, error: BaseException, *, where: str = "") -> UserBackendError:
        """Return the error for an exception of the package's code. `doing` says what it was to do, as "emit r0"."""
        if isinstance(error, UserBackendError):
            return error
        return self.error(f"failed to {doing}: {type(error).__name__}: {error}", where=where)


@lru_cache(maxsize=64)
def outside_entry(name: str) -> BackendEntry | None:
    """Return the entry of a backend of another package; None if no package defines a backend with this name.

    Imports the package's description of the backend, but neither its compile side nor its load side. Raises
    UserBackendError if the description does not load or is malformed, or if two packages define the name.
    """
    entries = user_backends().get(name, [])
    if not entries:
        return None
    owner = Owner(name, package_of(entries[0]))
    if len(entries) > 1:
        places = ", ".join(f"{entry.value} of {package_of(entry)}" for entry in entries)
        raise owner.error("has the name of another package's backend", where=places, hint="remove one of the packages")
    if not _NAME.fullmatch(name) or name == "auto":
        raise owner.error("has a name that cannot be used", expected="lower-case letters, digits and '_'")
    return _entry(_described(entries[0], owner), owner)


def _described(entry: EntryPoint, owner: Owner) -> PackageBackend:
    try:
        found = entry.load()
    except Exception as error:  # code of another package may raise anything
        raise owner.raised("be imported", error, where=_place(entry)) from error
    if not isinstance(found, PackageBackend):
        raise owner.error(f"is {found!r:.80}", where=entry.value, expected="an ingot.backends.outside.PackageBackend")
    if not found.emit or (odd := sorted(found.emit.keys() - set(DEVICES))):
        named = ", ".join(map(str, odd)) if found.emit else "no device"
        raise owner.error(f"is for {named}", where=entry.value, expected=" or ".join(DEVICES))
    places = {**found.emit, "executable": found.executable, "library": found.library, "find_op": found.find_op}
    for what, place in places.items():
        if not isinstance(place, str) or (place and not _PLACE.fullmatch(place)) or (what in found.emit and not place):
            raise owner.error(f"has the place {place!r:.80} for {what}", where=entry.value, expected="MODULE:NAME")
    return found


def _place(entry: EntryPoint) -> str:
    """Return an entry point with the place of its module, which may be another one than the package's.

    A folder of the same name may stand before the package on the path, as the folder that holds the project does.
    """
    module = sys.modules.get(entry.module)
    if module is None:
        return entry.value
    return f"{entry.value} of {module.__file__ or ', '.join(module.__path__)}"


def _entry(found: PackageBackend, owner: Owner) -> BackendEntry:
    places = [place for place in (*found.emit.values(), found.executable, found.library, found.find_op) if place]
    return BackendEntry(
        emit={device: partial(_made, owner, place) for device, place in found.emit.items()},
        executable=partial(_load_executable, owner, found.executable) if found.executable else None,
        library=partial(_load_library, owner, found.library) if found.library else None,
        find_op=partial(_find_op, owner, found.find_op) if found.find_op else None,
        competing={device: _OTHERS[device] for device in found.emit},
        links=(owner.package.name, *found.links),
        on_request=found.on_request,
        package=owner.package,
        modules=tuple(sorted({place.partition(":")[0].partition(".")[0] for place in places})),
    )


def _imported(owner: Owner, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise owner.raised("be imported", error, where=place) from error


def _made(owner: Owner, place: str, leader: str) -> Any:
    """Make the object of the compile side. The leader of the compile makes no difference to it."""
    made = _imported(owner, place)
    try:
        return made()
    except Exception as error:
        raise owner.raised("be made", error, where=place) from error


def _load_executable(
    owner: Owner, place: str, executable: Executable, directory: Path, context: LoadContext
) -> Callable[..., Sequence[torch.Tensor]]:
    load = _imported(owner, place)
    try:
        run = load(executable, directory, context)
    except Exception as error:
        raise owner.raised(f"load the executable {executable.id:.12}", error, where=str(directory)) from error
    if not callable(run):
        raise owner.error(f"loaded {run!r:.80}", where=place, expected="a function of the input tensors")
    return _checked(owner, executable, run)


def _load_library(
    owner: Owner, place: str, executable: Executable, directory: Path, context: LoadContext
) -> Mapping[str, Callable[..., Any]]:
    load = _imported(owner, place)
    try:
        functions = load(executable, directory, context)
    except Exception as error:
        raise owner.raised("load its library", error, where=str(directory)) from error
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise owner.error(f"loaded {functions!r:.80}", where=place, expected="functions of ops, by name")
    return functions


def _find_op(owner: Owner, place: str, target: str) -> Callable[..., Any] | None:
    find = _imported(owner, place)
    try:
        found: Callable[..., Any] | None = find(target)
    except Exception as error:
        raise owner.raised(f"find the op {target}", error, where=place) from error
    return found


def _checked(owner: Owner, executable: Executable, run: Callable[..., Any]) -> Callable[..., Sequence[torch.Tensor]]:
    """Return a function that calls `run`, and compares every result with the executable's signature.

    The executor checks results in the first step only. Code of another package is checked in every step, because a
    wrong stride would be read as wrong numbers.
    """
    import torch

    from ingot.ir.parse import parse_type

    outputs = [parse_type(text) for text in executable.outputs]
    # Symbol -> the input and axis that have its size.
    inputs = [parse_type(text) for text in executable.inputs]
    symbols = {
        size: (place, axis)
        for place, value_type in reversed(list(enumerate(inputs)))
        for axis, size in enumerate(value_type.shape)
        if isinstance(size, str)
    }
    what = f"the executable {executable.id:.12}"

    def call(*args: torch.Tensor) -> Sequence[torch.Tensor]:
        try:
            results = run(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise owner.raised(f"run {what}", error) from error
        if not isinstance(results, list | tuple) or len(results) != len(outputs):
            found = f"{len(results)} results" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
            raise owner.error(f"returned {found} from {what}", expected=f"a list of {len(outputs)} tensors")
        sizes = {name: args[place].shape[axis] for name, (place, axis) in symbols.items()}
        for number, (result, wanted) in enumerate(zip(results, outputs, strict=True)):
            problem = (
                wanted.mismatch(result, sizes)
                if isinstance(result, torch.Tensor)
                else f"a {type(result).__name__}, expected {wanted}"
            )
            if problem:
                given = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise owner.error(f"returned a result with {problem}", where=f"{what}, result {number}, {given}")
        return results

    return call
