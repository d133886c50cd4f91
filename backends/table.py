"""The table of backends: where each competes, what loads its code, and what its claims cost.

An entry names functions of its backend and imports none of them before it is called: loading an artifact imports no
compiler. The order of the table decides between claims that cost the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.ir.machine.extras import require

if TYPE_CHECKING:
    import torch

    from ingot.ir.artifact.plan import Executable
    from ingot.ir.backend import Backend
    from ingot.ir.machine.load_context import LoadContext

    CompileSide = Callable[[str], Backend]
    LoadedCall = Callable[..., Sequence[torch.Tensor]]
    Op = Callable[..., Any]
    LoadExecutable = Callable[[Executable, Path, LoadContext], LoadedCall]
    LoadLibrary = Callable[[Executable, Path, LoadContext], Mapping[str, Op]]
    FindOp = Callable[[str], Op | None]


@dataclass(frozen=True)
class ClaimCost:
    """What the claim of one call costs; the lowest wins where calls are not timed. `why` names the measurement, or the
    place that the backend is to have where there is none."""

    cost: float
    why: str


@dataclass(frozen=True)
class BackendEntry:
    """What is known of a backend without importing it.

    `emit` makes its compile side, by the devices that it computes on. It takes the name of the backend that leads: the
    first of those that compete. `costs` are those of its claims, by case. `executable` loads the code of a region or a
    call, `library` a library of kernels, as the ops that they compute by their printed names. `find_op` gives the
    function of such an op that needs nothing built, None for an op that the backend has not. `beside`, by device, makes
    it a choice of `--backend`: the backends that compete with it there. `links` are the packages that its code links
    with, as a target's versions name them.
    """

    emit: Mapping[str, CompileSide]
    costs: Mapping[str, ClaimCost] = field(default_factory=dict)
    executable: LoadExecutable | None = None
    library: LoadLibrary | None = None
    find_op: FindOp | None = None
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    links: tuple[str, ...] = ()


def _late(place: str) -> Callable[..., Any]:
    """The function that `place` names, MODULE:NAME in this package. The first call imports the module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args, **kwargs)

    return call


def _emit(place: str, needs: str = "", **asked: str) -> CompileSide:
    """The class of a compile side. `needs` is a package of the extra "cuda". Each option in `asked` is true where the
    backend that it names leads."""
    make = _late(place)

    def made(leader: str) -> Backend:
        if needs:
            require(needs, needs, "compiling for a GPU")
        backend: Backend = make(**{option: leader == name for option, name in asked.items()})
        return backend

    return made


_REFERENCES = ("reference", "rowwise")

BACKENDS: dict[str, BackendEntry] = {
    "flashinfer": BackendEntry(
        emit={"cuda": _emit("flashinfer.emit:FlashInfer")},
        costs={
            "fa3": ClaimCost(
                0.4,
                "FlashAttention-3 takes 0.5 to 0.7 of the time of our kernel for prompts of 4000 tokens and more on an "
                "H200: benchmarks/kernels/prefill.py",
            ),
            "fa2": ClaimCost(0.6, "FlashAttention-2 takes 1.0 to 1.4 of it: benchmarks/kernels/prefill.py"),
        },
        executable=_late("flashinfer.load:load"),
    ),
    "triton": BackendEntry(
        emit={"cuda": _emit("triton.emit:Triton", needs="triton")},
        costs={"": ClaimCost(0.5, "before libraries of matmuls: a kernel fuses what stands around one")},
        executable=_late("triton.load:load"),
        beside={"cuda": _REFERENCES},
    ),
    "cublas": BackendEntry(
        emit={"cuda": _emit("cublas.emit:Cublas")},
        costs={"": ClaimCost(1.0, "after kernels that fuse what stands around a matmul, before the reference")},
        find_op=_late("cublas.load:find_op"),
    ),
    "inductor": BackendEntry(
        emit={
            "cpu": _emit("inductor.emit:Inductor"),
            "cuda": _emit("inductor.emit_cuda:InductorCuda", ahead="inductor"),
        },
        costs={
            "cpu": ClaimCost(1.0, "between the cpu kernels for few tokens and those for many"),
            "cuda": ClaimCost(100.0, "after kernels and libraries of matmuls, before the reference"),
            "cuda, ahead": ClaimCost(0.1, "before all others: the user asks for it"),
        },
        executable=_late("inductor.load:load"),
        beside={"cpu": ("cpu", *_REFERENCES), "cuda": ("triton", *_REFERENCES)},
        links=("torch",),
    ),
    "cpu": BackendEntry(
        emit={"cpu": _emit("cpu.emit:Cpu")},
        costs={
            "few tokens": ClaimCost(0.5, "calling a region costs more than what it computes, and only it has others"),
            "many tokens": ClaimCost(2.0, "regions of inductor are faster"),
        },
        library=_late("cpu.load:load_library"),
    ),
    "reference": BackendEntry(
        emit={device: _emit("reference.emit:Reference", asked="reference") for device in ("cpu", "cuda")},
        costs={"": ClaimCost(1e6, "after every backend that has a kernel")},
        find_op=_late("reference.load:load_op"),
        beside={device: ("rowwise",) for device in ("cpu", "cuda")},
    ),
    "rowwise": BackendEntry(
        emit={device: _emit("reference.emit:Rowwise", asked="reference") for device in ("cpu", "cuda")},
        costs={"": ClaimCost(1e9, "only where nothing faster is batch-invariant")},
        find_op=_late("reference.load:load_rowwise"),
    ),
}


def claim_cost(backend: str, case: str = "") -> float:
    """What a claim of one call costs."""
    return BACKENDS[backend].costs[case].cost


def choices(device: str) -> dict[str, tuple[str, ...]]:
    """What each choice of --backend lets compete on a device. Every op has a backend in each."""
    found = {"auto": tuple(name for name, entry in BACKENDS.items() if device in entry.emit)}
    return found | {name: (name, *entry.beside[device]) for name, entry in BACKENDS.items() if device in entry.beside}
