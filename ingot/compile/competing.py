"""Select the backends that compete for a target."""

from collections.abc import Sequence

from ingot.backends.table import BACKENDS, choices
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable, toolchain_of
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.machine.target import Target


def competing(choice: str, target: Target) -> tuple[Backend, ...]:
    """Return the backends that a --backend choice lets compete for a target. Raises OptionError for a wrong choice."""
    known = choices(target.device)
    if choice not in known:
        elsewhere = choice in BACKENDS and BACKENDS[choice].beside
        what = (
            f"the backend '{choice}' is not for the target {target.name}"
            if elsewhere
            else f"unknown backend '{choice}'"
        )
        raise OptionError(what, expected=f"{', '.join(known)}, for the target {target.name}")
    if choice == "inductor" and target.device == "cuda":
        _check_inductor_compiles(target)
    return backends_named(known[choice], target.device)


def _check_inductor_compiles(target: Target) -> None:
    """Raise TargetError if Inductor, chosen by name, cannot compile here; under "auto" other backends replace it."""
    from ingot.backends.inductor.emit_cuda import missing_here

    if reason := missing_here(target.name):
        raise TargetError(
            f"the backend 'inductor' compiles nothing for {target.name} here: {reason}",
            hint="compile with --backend auto, or on a machine that has the missing part",
        )


def backends_named(names: Sequence[str], device: str) -> tuple[Backend, ...]:
    """Return backends by name, ready to compete for a device. The first one leads."""
    return tuple(_made(name, device, names[0]) for name in names)


def backend_named(name: str, device: str) -> Backend:
    """Return one backend to emit with."""
    return _made(name, device, leader="")


def _made(name: str, device: str, leader: str) -> Backend:
    try:
        return BACKENDS[name].emit[device](leader)
    except ImportError as error:
        raise TargetError(f"the backend '{name}' cannot be imported: {error}") from error


def with_choices(backend: Backend, choices: Sequence[Choice]) -> Backend:
    """Return the backend with these tile sizes, if its kernels have any. Raises OptionError for invalid sizes."""
    return backend.with_choices(choices) if choices and isinstance(backend, Tunable) else backend


def available(target: Target) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """Return the "auto" backends of a target that can run on this machine, and for each other one the reason."""
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
