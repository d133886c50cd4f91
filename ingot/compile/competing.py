"""Select the backends that may claim the calls of a compile."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.backends.entry import BackendEntry
from ingot.backends.table import (
    BACKENDS,
    choices,
    collective_backend,
    collective_competitors,
    find_entry,
    outside_names,
)
from ingot.compile.outside_backend import guarded
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable, toolchain_of
from ingot.ir.errors import OptionError, TargetError, UserBackendError
from ingot.ir.machine.target import Target
from ingot.ir.mesh import ONE_DEVICE, within_stage


@dataclass(frozen=True)
class Competitors:
    """The backends that may compute the calls of a compile.

    - `choice`: the value of --backend that selects them, in its shortest form
    - `asked`: those that the value names. A compile does not go on without them
    - `dropped`: by name of a backend of another package that cannot be used: the reason
    """

    choice: str
    backends: tuple[Backend, ...]
    asked: frozenset[str]
    dropped: Mapping[str, str]


def competing(choice: str, target: Target, mesh: Mapping[str, int] = ONE_DEVICE) -> tuple[Backend, ...]:
    """Return the backends that may compute calls for a target. `competitors` describes arguments and errors."""
    return competitors(choice, target, mesh).backends


def competitors(choice: str, target: Target, mesh: Mapping[str, int] = ONE_DEVICE) -> Competitors:
    """Return the backends that may compute calls for a target.

    `choice` is the value of --backend: "auto", or the name of a backend that comes first. Further names of backends may
    follow after commas, as in "auto,onnx"; they compete too. With "auto", the backends of other packages compete. For a
    `mesh` of several devices, the backends that compute collectives between them are more. If one of them is named,
    others do not compete with it, as in "auto,nccl".

    Raises OptionError for an unknown name. Raises TargetError if a named backend cannot compile for the target on this
    machine, and UserBackendError if it is of another package and cannot be used.
    """
    first, *others = [one.strip() for one in choice.split(",")]
    known = choices(target.device)
    if first not in known:
        _check_name(first, choice, target)
    across = _collectives(first, others, target, mesh)
    for name in others:
        if name not in across:
            _check_name(name, choice, target)
    asked = frozenset({first, *others} - {"auto"})
    if target.device == "cuda":
        for name in asked & _NEED_THE_GPU.keys():
            _check_compiles(name, target)
    beside = known[first] if first in known else (first, *_entry_of(first).competing[target.device])
    names = tuple(dict.fromkeys((*beside, *others)))
    made = {name: _made(name, target.device, names[0]) for name in names}
    others_of_auto, dropped = _of_packages(target.device, names[0]) if first == "auto" else ({}, {})
    made |= {name: one for name, one in others_of_auto.items() if name not in made}
    dropped = {name: reason for name, reason in dropped.items() if name not in made}
    shortest = _shortest(choice, tuple(made), dropped, known)
    made |= {name: _made(name, target.device, names[0]) for name in across if name not in made}
    return Competitors(shortest, tuple(made.values()), asked, dropped)


def _collectives(first: str, others: Sequence[str], target: Target, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of the backends that compute collectives, if ranks of `mesh` have parts of one layer.

    Stages send values between calls, and need no collective. `first` and `others` are the names of --backend.
    """
    if not within_stage(mesh):
        return ()
    every = collective_competitors(target.device)
    if first != "auto" or not set(others).isdisjoint(every):
        return (collective_backend(target.device),)
    return every


def _of_packages(device: str, leader: str) -> tuple[dict[str, Backend], dict[str, str]]:
    """Return the backends of other packages that compete for a device without being named.

    The second result has the reason for each that cannot be used, such as a package that does not import.
    """
    made: dict[str, Backend] = {}
    dropped: dict[str, str] = {}
    for name in outside_names():
        try:
            entry = find_entry(name)
            if entry is None or device not in entry.emit or entry.on_request:
                continue
            backend = _made(name, device, leader)
            toolchain_of(backend)
            made[name] = backend
        except UserBackendError as error:
            dropped[name] = error.what
    return made, dropped


def _shortest(choice: str, names: tuple[str, ...], dropped: Collection[str], known: Mapping[str, Sequence[str]]) -> str:
    """Return the first value of --backend that selects the backends `names`, or else `choice`.

    "auto" selects other backends where other packages are installed, so it then replaces no other value.
    """
    if "," in choice or dropped or outside_names():
        return choice
    return next((name for name, among in known.items() if among == names), choice)


def _check_name(name: str, choice: str, target: Target) -> None:
    """Raise OptionError if `name`, a part of the value `choice` of --backend, is no backend for the target."""
    entry = _entry_of(name) if name in BACKENDS or name in outside_names() else None
    devices = () if entry is None or entry.collectives else entry.competing if choice.startswith(name) else entry.emit
    if target.device in devices:
        return
    known = dict.fromkeys((*choices(target.device), *outside_names()))
    elsewhere = entry is not None and (entry.competing or entry.package is not None)
    what = f"the backend '{name}' is not for the target {target.name}" if elsewhere else f"unknown backend '{name}'"
    raise OptionError(what, expected=f"{', '.join(known)}, for the target {target.name}")


def _entry_of(name: str) -> BackendEntry:
    entry = find_entry(name)
    assert entry is not None, name
    return entry


def _inductor_lacks(target: str) -> str:
    from ingot.backends.inductor.emit_cuda import missing_here

    return missing_here(target)


def _tensorrt_lacks(target: str) -> str:
    from ingot.backends.tensorrt.library import missing_here

    return missing_here(target)


# By backend that runs kernels while it compiles for a GPU: why this machine cannot compile for a target, or "".
_NEED_THE_GPU = {"inductor": _inductor_lacks, "tensorrt": _tensorrt_lacks}


def _check_compiles(name: str, target: Target) -> None:
    """Raise TargetError if the backend `name`, which `--backend` names, cannot compile for the target on this machine.

    With "auto", other backends replace it.
    """
    if reason := _NEED_THE_GPU[name](target.name):
        raise TargetError(
            f"the backend '{name}' compiles nothing for {target.name} here: {reason}",
            hint="compile with --backend auto, or on a machine that has the missing part",
        )


def backends_named(names: Sequence[str], device: str) -> tuple[Backend, ...]:
    """Return the backends with these names for a device, "cpu" or "cuda".

    The first of `names` is the leader. Some backends accept more calls if they lead, so all constructors receive its
    name.
    """
    return tuple(_made(name, device, names[0]) for name in names)


def backend_named(name: str, device: str) -> Backend:
    """Return the backend `name` for a device, "cpu" or "cuda". The caller compiles code with it."""
    return _made(name, device, leader="")


def _made(name: str, device: str, leader: str) -> Backend:
    entry = find_entry(name)
    if entry is None or device not in entry.emit:
        raise OptionError(
            f"the backend '{name}' is not installed" if entry is None else f"the backend '{name}' is not for {device}",
            expected=", ".join(dict.fromkeys((*choices(device), *outside_names()))),
            hint="install the package that brings it",
        )
    try:
        made = entry.emit[device](leader)
        return made if entry.package is None else guarded(made, name, entry)
    except ImportError as error:
        raise TargetError(f"the backend '{name}' cannot be imported: {error}") from error


def with_choices(backend: Backend, choices: Sequence[Choice]) -> Backend:
    """Return a backend that compiles its kernels with the tile sizes `choices`.

    A backend without tile sizes is returned unchanged. Raises OptionError for sizes that its kernels do not support.
    """
    return backend.with_choices(choices) if choices and isinstance(backend, Tunable) else backend


def on_request(target: Target) -> dict[str, str]:
    """Return the backends that compete for `target` only if `--backend` names them.

    The value says why this machine cannot compile with the backend; "" if it can.
    """
    found: dict[str, str] = {}
    for name, entry in BACKENDS.items():
        if not entry.on_request or target.device not in entry.emit:
            continue
        try:
            toolchain_of(_made(name, target.device, leader=""))
            found[name] = _NEED_THE_GPU[name](target.name) if name in _NEED_THE_GPU else ""
        except TargetError as error:
            found[name] = error.what
    return found


def available(target: Target) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """Return the backends of `--backend auto` that can compile for `target` on this machine.

    The second result maps the name of each other backend to the reason why it is not available.
    """
    made: list[Backend] = []
    unavailable: dict[str, str] = {}
    for name in choices(target.device)["auto"]:
        try:
            backend = _made(name, target.device, leader="")
            toolchain_of(backend)
        except TargetError as error:
            unavailable[name] = error.what
        else:
            made.append(backend)
    others, dropped = _of_packages(target.device, leader="")
    return (*made, *others.values()), unavailable | dropped
