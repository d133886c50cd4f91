"""Select the backends that may claim the calls of a compile."""

from collections.abc import Mapping, Sequence

from ingot.backends.table import BACKENDS, choices, collective_backend
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable, toolchain_of
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.machine.target import Target
from ingot.ir.mesh import ONE_DEVICE, mesh_text


def competing(choice: str, target: Target, mesh: Mapping[str, int] = ONE_DEVICE) -> tuple[Backend, ...]:
    """Return the backends that may compute calls for a target. `choice` is the value of --backend, such as "auto".

    For a `mesh` of several devices, the backend that computes collectives between them is one more.

    Raises OptionError for an unknown choice. Raises TargetError if `choice` is "inductor" and Inductor cannot compile
    for the target on this machine.
    """
    known = choices(target.device)
    if choice not in known:
        elsewhere = choice in BACKENDS and BACKENDS[choice].competing
        what = (
            f"the backend '{choice}' is not for the target {target.name}"
            if elsewhere
            else f"unknown backend '{choice}'"
        )
        raise OptionError(what, expected=f"{', '.join(known)}, for the target {target.name}")
    if choice == "inductor" and target.device == "cuda":
        _check_inductor_compiles(target)
    return backends_named((*known[choice], *_collectives(target, mesh)), target.device)


def _collectives(target: Target, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the name of the backend that computes collectives, if `mesh` has several devices.

    Raises OptionError if no backend does so for the target.
    """
    if not mesh:
        return ()
    if (name := collective_backend(target.device)) is None:
        raise OptionError(
            f"the mesh {mesh_text(mesh)} for the target {target.name}",
            expected="a mesh of CPU processes: the collectives of GPUs (NCCL) are not built yet",
            hint="compile with --target cpu, or without --mesh",
        )
    return (name,)


def _check_inductor_compiles(target: Target) -> None:
    """Raise TargetError if Inductor cannot compile for the target on this machine.

    Only `--backend inductor` needs this check. With "auto", other backends replace Inductor.
    """
    from ingot.backends.inductor.emit_cuda import missing_here

    if reason := missing_here(target.name):
        raise TargetError(
            f"the backend 'inductor' compiles nothing for {target.name} here: {reason}",
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
    try:
        return BACKENDS[name].emit[device](leader)
    except ImportError as error:
        raise TargetError(f"the backend '{name}' cannot be imported: {error}") from error


def with_choices(backend: Backend, choices: Sequence[Choice]) -> Backend:
    """Return a backend that compiles its kernels with the tile sizes `choices`.

    A backend without tile sizes is returned unchanged. Raises OptionError for sizes that its kernels do not support.
    """
    return backend.with_choices(choices) if choices and isinstance(backend, Tunable) else backend


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
    return tuple(made), unavailable
