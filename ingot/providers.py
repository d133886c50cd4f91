"""The backends that compute, and which of them compete for a target."""

import importlib
from collections.abc import Callable, Mapping, Sequence

from ingot.backends.cpu.emit import Cpu
from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir.backend import Backend, Tunable
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.extras import require
from ingot.ir.target import Target
from ingot.ir.tuning import Choice


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


BACKENDS: Mapping[str, Callable[[], Backend]] = {
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
        "auto": ("flashinfer", "triton", "cublas", "reference", "rowwise"),
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
    return tuple(BACKENDS[name]() for name in choices[choice])


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
            backend = BACKENDS[name]()
            backend.toolchain()
        except TargetError as error:
            unavailable[name] = error.what
        else:
            made.append(backend)
    return tuple(made), unavailable
