"""The table of backends: the devices that each supports, the functions that load its code, the costs of its claims.

The table names each backend's functions as text, and imports one when it is called. Loading an artifact therefore
imports no compiler. Among claims of equal cost, the first backend of the table wins.
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
    from ingot.ir.machine.load_context import Communicator, LoadContext

    CompileSide = Callable[[str], Backend]
    LoadedCall = Callable[..., Sequence[torch.Tensor]]
    Op = Callable[..., Any]
    LoadExecutable = Callable[[Executable, Path, LoadContext], LoadedCall]
    LoadLibrary = Callable[[Executable, Path, LoadContext], Mapping[str, Op]]
    FindOp = Callable[[str], Op | None]
    Collectives = Callable[[LoadContext], Mapping[str, Op]]
    Connect = Callable[[Path, str, int, int], Communicator]


@dataclass(frozen=True)
class ClaimCost:
    """The cost that a backend states when it claims (offers to compute) a call. The claim of the lowest cost wins.

    Costs have no unit. `why` is the reason for the number: a measurement, or the rank among backends. Calls whose
    kernels are timed at compile time do not use costs.
    """

    cost: float
    why: str


@dataclass(frozen=True)
class BackendEntry:
    """The description of a backend, available without importing it. A device is "cpu" or "cuda".

    The *leader* of a compile is the first of the backends that compete for its calls.

    - `emit`: functions by device that make the backend object. Each takes the leader's name.
    - `costs`: the costs of its claims, by a case such as "few tokens". A single cost has the key "".
    - `executable`: loads the compiled code of a region (connected calls) or of one call.
    - `library`: loads a library of kernels. It returns the functions of ops by name, such as "ingot.linear".
    - `find_op`: returns the function of an op that needs no build, or None if the backend lacks the op.
    - `competing`: the backends that compete with this one if it is the value of `--backend`, by device. `--backend`
      cannot name this backend for a device that is no key.
    - `links`: the packages that its compiled code links with, such as "torch".
    - `collectives`: returns the functions of the ops that ranks of a mesh compute together. Such a backend computes
      nothing else: it joins the others of a compile for a mesh, and `--backend` cannot name it.
    - `connect`: connects the ranks of a mesh axis. It takes a private folder, the group's name, this rank's index on
      the axis, and the number of ranks.
    """

    emit: Mapping[str, CompileSide]
    costs: Mapping[str, ClaimCost] = field(default_factory=dict)
    executable: LoadExecutable | None = None
    library: LoadLibrary | None = None
    find_op: FindOp | None = None
    competing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    collectives: Collectives | None = None
    connect: Connect | None = None


def _late(place: str) -> Callable[..., Any]:
    """Return a function that imports a module when it is called, and then calls a function of that module.

    `place` is "MODULE:NAME", relative to this package, such as "flashinfer.load:load".
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*args, **kwargs)

    return call


def _emit(place: str, needs: str = "", **asked: str) -> CompileSide:
    """Return a function that makes a backend, given the name of the leader (the first competing backend).

    `place` is the backend's class as "MODULE:NAME". `needs` is a package that must be installed, or "". `asked` maps
    options of the class to backend names. An option is true if the leader has that name.
    """
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
        costs={"": ClaimCost(0.5, "before matmul libraries: a kernel fuses the ops around a matmul")},
        executable=_late("triton.load:load"),
        competing={"cuda": _REFERENCES},
    ),
    "cublas": BackendEntry(
        emit={"cuda": _emit("cublas.emit:Cublas")},
        costs={"": ClaimCost(1.0, "after kernels that fuse the ops around a matmul, before the reference")},
        find_op=_late("cublas.load:find_op"),
    ),
    "inductor": BackendEntry(
        emit={
            "cpu": _emit("inductor.emit:Inductor"),
            "cuda": _emit("inductor.emit_cuda:InductorCuda", ahead="inductor"),
        },
        costs={
            "cpu": ClaimCost(1.0, "between the cpu kernels for few tokens and those for many"),
            "cuda": ClaimCost(100.0, "after kernels and matmul libraries, before the reference"),
            "cuda, ahead": ClaimCost(0.1, "before all others: the user requested it"),
        },
        executable=_late("inductor.load:load"),
        competing={"cpu": ("cpu", *_REFERENCES), "cuda": ("triton", *_REFERENCES)},
        links=("torch",),
    ),
    "cpu": BackendEntry(
        emit={"cpu": _emit("cpu.emit:Cpu")},
        costs={
            "few tokens": ClaimCost(0.5, "a region's call costs more than it computes; only cpu has the other ops"),
            "many tokens": ClaimCost(2.0, "regions of inductor are faster"),
            "quantized": ClaimCost(0.5, "regions of inductor write the whole weight as float32 in each step"),
        },
        library=_late("cpu.load:load_library"),
    ),
    # A mesh of GPUs needs another such entry, for "cuda", with the collectives of NCCL.
    "gloo": BackendEntry(
        emit={"cpu": _emit("gloo.emit:Gloo")},
        costs={"": ClaimCost(0.1, "no other backend computes collectives")},
        collectives=_late("gloo.load:collectives"),
        connect=_late("gloo.load:GlooCommunicator"),
    ),
    "reference": BackendEntry(
        emit={device: _emit("reference.emit:Reference", asked="reference") for device in ("cpu", "cuda")},
        costs={"": ClaimCost(1e6, "after every backend that has a kernel")},
        find_op=_late("reference.load:load_op"),
        competing={device: ("rowwise",) for device in ("cpu", "cuda")},
    ),
    "rowwise": BackendEntry(
        emit={device: _emit("reference.emit:Rowwise", asked="reference") for device in ("cpu", "cuda")},
        costs={"": ClaimCost(1e9, "only where nothing faster is batch-invariant")},
        find_op=_late("reference.load:load_rowwise"),
    ),
}


def claim_cost(backend: str, case: str = "") -> float:
    """Return the cost that a backend states for one call. `case` is a key of its `costs`, such as "few tokens"."""
    return BACKENDS[backend].costs[case].cost


def choices(device: str) -> dict[str, tuple[str, ...]]:
    """Return the values of the option --backend on a device ("cpu" or "cuda"), each with the backends that compete.

    The backends of each value together compute every op.
    """
    alone = {name for name, entry in BACKENDS.items() if entry.collectives is None}
    found = {"auto": tuple(name for name, entry in BACKENDS.items() if device in entry.emit and name in alone)}
    return found | {
        name: (name, *entry.competing[device]) for name, entry in BACKENDS.items() if device in entry.competing
    }


def collective_backend(device: str) -> str | None:
    """Return the name of the backend that connects the ranks of a mesh of devices ("cpu" or "cuda").

    None if no backend does.
    """
    return next((name for name, one in BACKENDS.items() if one.connect is not None and device in one.emit), None)
