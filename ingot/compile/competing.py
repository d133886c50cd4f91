"""Which backends compete for a target."""

from collections.abc import Sequence

from ingot.backends.table import BACKENDS, choices
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable, toolchain_of
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.machine.target import Target


def competing(choice: str, target: Target) -> tuple[Backend, ...]:
    """The backends that a choice of --backend lets compete for a target. Raises OptionError for one that it has not."""
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
    """Asked for by name, it says why it compiles nothing; under "auto" others take over."""
    from ingot.backends.inductor.emit_cuda import missing_here

    if reason := missing_here(target.name):
        raise TargetError(
            f"the backend 'inductor' compiles nothing for {target.name} here: {reason}",
            hint="compile with --backend auto, or on a machine that has what is missing here",
        )


def backends_named(names: Sequence[str], device: str) -> tuple[Backend, ...]:
    """Backends by name, as they compete for a device. The first one leads."""
    return tuple(_made(name, device, names[0]) for name in names)


def backend_named(name: str, device: str) -> Backend:
    """One of them, to emit with."""
    return _made(name, device, leader="")


def _made(name: str, device: str, leader: str) -> Backend:
    try:
        return BACKENDS[name].emit[device](leader)
    except ImportError as error:
        raise TargetError(f"the backend '{name}' cannot be imported: {error}") from error


def with_choices(backend: Backend, choices: Sequence[Choice]) -> Backend:
    """The backend with these tile sizes, where its kernels have any. Raises OptionError for sizes that they cannot
    have."""
    return backend.with_choices(choices) if choices and isinstance(backend, Tunable) else backend


def available(target: Target) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """Of the backends that "auto" lets compete for a target those that this machine has what they need for, and of the
    others the reasons."""
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
