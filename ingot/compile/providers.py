"""The backends that compute, and which of them compete for a target."""

import importlib
from collections.abc import Callable, Mapping, Sequence

from ingot.backends.cpu.emit import Cpu
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir.artifact.tuning import Choice
from ingot.ir.backend import Backend, Tunable
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.machine.extras import require
from ingot.ir.machine.target import Target


def _triton() -> Backend:
    require("triton", "triton", "compiling for a GPU")
    return _imported("ingot.backends.triton.emit", "Triton")


def _cublas() -> Backend:
    return _imported("ingot.backends.cublas.emit", "Cublas")


def _flashinfer() -> Backend:
    return _imported("ingot.backends.flashinfer.emit", "FlashInfer")


def _imported(module: str, name: str) -> Backend:
    """A backend for GPUs, which nobody imports who compiles for a CPU."""
    try:
        made: Backend = getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise TargetError(f"the backend '{name.lower()}' cannot be imported: {error}") from error
    return made


def _inductor_cuda(*, ahead: bool = False) -> Backend:
    from ingot.backends.inductor.emit_cuda import InductorCuda

    return InductorCuda(ahead=ahead)


BACKENDS: Mapping[str, Callable[..., Backend]] = {
    "cpu": Cpu,
    "inductor": Inductor,
    "triton": _triton,
    "cublas": _cublas,
    "flashinfer": _flashinfer,
    "reference": Reference,
    "rowwise": Rowwise,
}
# What each choice of --backend lets compete, by the target's device; every op has a provider in each.
BACKEND_CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {
        "auto": ("inductor", "cpu", "reference", "rowwise"),
        "inductor": ("inductor", "cpu", "reference", "rowwise"),
        "reference": ("reference", "rowwise"),
    },
    "cuda": {
        "auto": ("flashinfer", "triton", "cublas", "inductor", "reference", "rowwise"),
        "inductor": ("inductor", "triton", "reference", "rowwise"),
        "triton": ("triton", "reference", "rowwise"),
        "reference": ("reference", "rowwise"),
    },
}


def competing(choice: str, target: Target) -> tuple[Backend, ...]:
    """The backends that a choice of --backend lets compete for a target. Raises OptionError for one that it has not."""
    choices = BACKEND_CHOICES[target.device]
    if choice not in choices:
        known = any(choice in others for others in BACKEND_CHOICES.values())
        what = f"the backend '{choice}' is not for the target {target.name}" if known else f"unknown backend '{choice}'"
        raise OptionError(what, expected=f"{', '.join(choices)}, for the target {target.name}")
    if choice == "inductor" and target.device == "cuda":
        _check_inductor_compiles(target)
    return backends_named(choices[choice], target.device)


def _check_inductor_compiles(target: Target) -> None:
    """Who asks for it by name is told why it takes nothing, where under "auto" others take over."""
    from ingot.backends.inductor.emit_cuda import missing_here

    if reason := missing_here(target.name):
        raise TargetError(
            f"the backend 'inductor' compiles nothing for {target.name} here: {reason}",
            hint="compile with --backend auto, or on a machine that has what is missing here",
        )


def backends_named(names: Sequence[str], device: str) -> tuple[Backend, ...]:
    """Backends by name, as they compete for a device. On a GPU inductor takes what it can where it is named first, and
    references stand in for every kernel where they are."""
    asked = list(names[:1]) == ["reference"]
    return tuple(_competitor(name, device, first=place == 0, asked=asked) for place, name in enumerate(names))


def _competitor(name: str, device: str, *, first: bool, asked: bool) -> Backend:
    if (name, device) == ("inductor", "cuda"):
        return _inductor_cuda(ahead=first)
    return BACKENDS[name](asked=asked) if name in ("reference", "rowwise") else BACKENDS[name]()


def backend_named(name: str, device: str) -> Backend:
    """One of them, to emit with."""
    return _inductor_cuda() if (name, device) == ("inductor", "cuda") else BACKENDS[name]()


def with_choices(backend: Backend, choices: Sequence[Choice]) -> Backend:
    """The backend with these tile sizes, where its kernels have any. Raises OptionError for sizes that they cannot
    have."""
    return backend.with_choices(choices) if choices and isinstance(backend, Tunable) else backend


def available(target: Target) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """Of the backends that "auto" lets compete for a target those that this machine has what they need for, and of the
    others the reasons."""
    made: list[Backend] = []
    unavailable: dict[str, str] = {}
    for name in BACKEND_CHOICES[target.device]["auto"]:
        try:
            backend = _competitor(name, target.device, first=False, asked=False)
            backend.toolchain()
        except TargetError as error:
            unavailable[name] = error.what
        else:
            made.append(backend)
    return tuple(made), unavailable
