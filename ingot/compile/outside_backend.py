"""The compile side of a backend of another package, guarded: what it does wrong is an error that names the package."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch import fx

from ingot.backends.entry import BackendEntry
from ingot.backends.outside import Owner
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.backend import Backend, Claim, Compiler, FunctionBackend, LibraryBuilder, RegionCompiler, Tunable, Yes
from ingot.ir.backend import No as Refusal
from ingot.ir.errors import IngotError, UserBackendError
from ingot.ir.machine.extras import installed_version
from ingot.ir.machine.target import Target
from ingot.ir.plugins import Package
from ingot.ir.program import Program, target_name
from ingot.ir.types import TensorType
from ingot.runtime.loading.load_context import on_one_device

# Methods that belong together: a class that has one of a row needs the whole row.
_TOGETHER = (
    ("emit", "workspace", "sources", "toolchain"),
    ("emit_library", "sources", "toolchain", "dry_run"),
    ("cover", "warm_up", "emit"),
    ("choices", "with_choices", "measures", "measure", "tuning_sources", "emit"),
)
_GUARDED = (
    *("dry_run", "sources", "toolchain", "emit_library", "emit", "workspace", "cover", "warm_up"),
    *("takes_apart", "choices", "measures", "measure", "tuning_sources"),
)


def kind_of(backend: Backend) -> str:
    """Return what a backend compiles, in words: "region compiler", "compiler of calls", "library" or "functions"."""
    if isinstance(backend, RegionCompiler):
        return "region compiler"
    if isinstance(backend, Compiler):
        return "compiler of calls"
    return "kernel library" if isinstance(backend, LibraryBuilder) else "functions"


def backend_facts(backend: Backend) -> dict[str, str]:
    """Return the name, kind, package and version of a backend. Ingot's own have the package "ingot"."""
    package = backend.package if isinstance(backend, OutsideBackend) else Package("ingot", installed_version("ingot"))
    return {"name": backend.name, "kind": kind_of(backend), "package": package.name, "version": package.version}


def guarded(backend: object, name: str, entry: BackendEntry) -> Backend:
    """Return a backend of another package that raises UserBackendError for whatever the package does wrong.

    It has the methods of `backend`, so that the protocols of `ingot.ir.backend` fit as before. Code that it compiles
    is loaded and run once, if this machine is the target. Raises UserBackendError if `backend` is no backend.
    """
    assert entry.package is not None
    return cast(Backend, OutsideBackend(backend, Owner(name, entry.package), entry))


def package_document(backend: Backend) -> dict[str, Any]:
    """Return a JSON document of the package that a backend belongs to: its version and the digests of its files.

    Return an empty dict for a backend of Ingot.
    """
    return backend.document() if isinstance(backend, OutsideBackend) else {}


class OutsideBackend:
    """A guard around the compile side of another package's backend. `guarded` makes it.

    The methods that `backend` has are set on the instance, so `isinstance` finds the protocols that `backend` has.
    """

    def __init__(self, backend: object, owner: Owner, entry: BackendEntry) -> None:
        self.name, self.package = owner.backend, owner.package
        self._backend: Any = backend
        self._owner, self._entry = owner, entry
        place = f"{type(backend).__module__}.{type(backend).__qualname__}"
        if getattr(backend, "name", None) != owner.backend:
            found = getattr(backend, "name", None)
            raise owner.error(f"has the name {found!r:.80} in its class", where=place, expected=repr(owner.backend))
        if not callable(getattr(backend, "claim", None)):
            raise owner.error("has no method claim", where=place, expected="the protocol ingot.ir.backend.Backend")
        for first, *others in _TOGETHER:
            if hasattr(backend, first) and (missing := [one for one in others if not hasattr(backend, one)]):
                raise owner.error(
                    f"has {first}, and no {missing[0]}", where=place, expected="the protocols of ingot.ir.backend"
                )
        if hasattr(backend, "emit"):
            compiles_calls = getattr(backend, "compiles_calls", None)
            if not isinstance(compiles_calls, bool):
                raise owner.error("does not say whether it compiles_calls", where=place, expected="True or False")
            if entry.executable is None:
                raise owner.error("compiles executables, and names no function that loads them", where=place)
            self.compiles_calls = compiles_calls
        if isinstance(backend, LibraryBuilder) and entry.library is None:
            raise owner.error("builds a library, and names no function that loads it", where=place)
        if not isinstance(backend, Compiler | FunctionBackend):
            raise owner.error(
                "has neither emit nor dry_run", where=place, expected="a protocol derived from ingot.ir.backend.Backend"
            )
        for method in _GUARDED:
            if hasattr(backend, method):
                setattr(self, method, getattr(self, f"_{method}", self._called(method)))
        if isinstance(backend, Tunable):
            self.with_choices = self._with_choices

    def blamed(self, error: IngotError) -> UserBackendError:
        """Return the error for a worker process that died while the package's code compiled or ran."""
        return self._owner.error(f"failed: {error.what}", where=error.where)

    def _called(self, method: str) -> Callable[..., Any]:
        """Return a function that calls a method of the backend, and names the package if that raises."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return getattr(self._backend, method)(*args, **kwargs)
            except IngotError as error:  # a missing compiler, for example: keep its hint
                raise self._owner.error(
                    f"failed in {method}: {error.what}", where=error.where, expected=error.expected, hint=error.hint
                ) from error
            except Exception as error:
                raise self._owner.raised(f"answer {method}", error) from error

        return call

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Claim:
        answer = self._called("claim")(nodes, target, bucket)
        several = answer if isinstance(answer, tuple) and answer else (answer,)
        what = ", ".join(target_name(node.target) for node in nodes)
        for one in several:
            if isinstance(one, Refusal) and len(several) == 1:
                continue
            if not isinstance(one, Yes):
                raise self._owner.error(f"answered a claim of {what} with {answer!r:.80}", expected="Yes or No")
            if not isinstance(one.cost, int | float) or not math.isfinite(one.cost) or one.cost < 0:
                raise self._owner.error(f"claims {what} at the cost {one.cost!r:.40}", expected="a number from 0 on")
        return cast(Claim, answer)

    def _emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Let the package compile a program, and check the result: its description, its files, and one run of it."""
        try:
            made = self._called("emit")(body, key, target, directory)
        except UserBackendError as error:
            calls = ", ".join(dict.fromkeys(target_name(node.target) for node in body.calls()))
            raise self._owner.error(
                f"claims {calls}, and cannot emit it: {error.what.partition(': ')[2]}",
                where=error.where,
                expected=error.expected,
                hint=error.hint,
            ) from error
        executable = self._executable(made, key, directory)
        inputs = tuple(map(str, body.input_types().values()))
        outputs = tuple(str(node.meta["type"]) for node in body.output_nodes().values())
        if (executable.inputs, executable.outputs) != (inputs, outputs):
            raise self._owner.error(
                f"emitted code of ({', '.join(executable.inputs)}) to ({', '.join(executable.outputs)})",
                expected=f"({', '.join(inputs)}) to ({', '.join(outputs)}), the signature of the program",
            )
        if not target.missing_here():
            self._try(executable, body, directory, target)
        return executable

    def _emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        made = self._executable(self._called("emit_library")(key, target, directory), key, directory)
        if not target.missing_here():
            assert self._entry.library is not None
            self._entry.library(made, directory, on_one_device(target.device))
        return made

    def _workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        found = self._called("workspace")(body, executable, directory, sizes, threads)
        if not isinstance(found, int) or found < 0:
            raise self._owner.error(f"says that a call allocates {found!r:.40} bytes", expected="an integer from 0 on")
        return found

    def _cover(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
        found = self._called("cover")(nodes)
        if found is not None and sorted(map(id, (one for group in found for one in group))) != sorted(map(id, nodes)):
            raise self._owner.error("covers other calls than it claimed", expected="each of the calls in one region")
        return cast("list[list[fx.Node]] | None", found)

    def _sources(self) -> Sequence[Path]:
        return self._source_files("sources")

    def _tuning_sources(self) -> Sequence[Path]:
        return self._source_files("tuning_sources")

    def _source_files(self, method: str) -> Sequence[Path]:
        """Return the files that a method of the backend names, and check that they are there."""
        found = tuple(self._called(method)())
        if odd := [one for one in found if not isinstance(one, Path) or not one.is_file()]:
            raise self._owner.error(f"names {odd[0]!s:.200} among its sources", expected="files that are there")
        return found

    def _with_choices(self, choices: Sequence[Any]) -> "OutsideBackend":
        return OutsideBackend(self._called("with_choices")(choices), self._owner, self._entry)

    def _executable(self, made: object, key: str, directory: Path) -> Executable:
        """Check the description of compiled code, and that its files are in the folder that it was compiled into."""
        if not isinstance(made, Executable):
            raise self._owner.error(f"emitted {made!r:.80}", expected="an ingot.ir.artifact.plan.Executable")
        if (made.id, made.backend) != (key, self.name):
            raise self._owner.error(
                f"emitted an executable with the id {made.id:.12} of the backend '{made.backend}'",
                expected=f"the id {key:.12}, which it was given, and '{self.name}'",
            )
        if not made.files:
            raise self._owner.error("emitted no files", expected="at least one, in the folder that it was given")
        for name in made.files:
            path, parts = directory / name, PurePosixPath(name).parts
            outside = PurePosixPath(name).is_absolute() or ".." in parts or path.is_symlink()
            if outside or not path.resolve().is_relative_to(directory.resolve()):
                raise self._owner.error(
                    f"emitted the file {name!r:.200}, which is outside its folder",
                    where=str(directory),
                    expected="files in the folder that it was given, named relative to it",
                )
            if not path.is_file():
                raise self._owner.error(f"did not write the file {name!r:.200}", where=str(directory))
        return made

    def _try(self, executable: Executable, body: Program, directory: Path, target: Target) -> None:
        """Load the code and run it once at two sizes, so that a wrong result stops the compile and not a request.

        Only dtypes, shapes and strides of the results are checked. The inputs are zeros.
        """
        assert self._entry.executable is not None
        run = self._entry.executable(executable, directory, on_one_device(target.device))
        for more in (0, 1):
            sizes = {name: min(dim.hi, dim.lo + more) for name, dim in body.dims.items()}
            run(*(_zeros(value_type, sizes, target.device) for value_type in body.input_types().values()))

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the package: its name, its version, and the digests of its files."""
        return {
            "name": self.package.name,
            "version": self.package.version,
            "files": {
                name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(self._files().items())
            },
        }

    def _files(self) -> dict[str, Path]:
        """Return the files of the modules that the package's backend names, by path in the package. No bytecode."""
        found: dict[str, Path] = {}
        for module in self._entry.modules:
            spec = find_spec(module)
            folders = list(spec.submodule_search_locations or ()) if spec else []
            if not folders and spec is not None and spec.origin:
                found[Path(spec.origin).name] = Path(spec.origin)
            for folder in map(Path, folders):
                for path in folder.rglob("*"):
                    if path.is_file() and path.suffix != ".pyc":
                        found[f"{module}/{path.relative_to(folder).as_posix()}"] = path
        return found


def _zeros(value_type: TensorType, sizes: Mapping[str, int], device: str) -> torch.Tensor:
    shape = value_type.bind(sizes)
    if value_type.strides is None:
        return torch.zeros(shape, dtype=value_type.dtype, device=device)
    return torch.empty_strided(shape, value_type.strides, dtype=value_type.dtype, device=device).zero_()
