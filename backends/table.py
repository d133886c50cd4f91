"""The table of backends: the devices that each supports, the functions that load its code, the costs of its claims.

The table names each backend's functions as text, and imports one when it is called. Loading an artifact therefore
imports no compiler. Among claims of equal cost, the first backend of the table wins.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ingot.backends.entry import BackendEntry, ClaimCost
from ingot.ir.artifact.plan import REFERENCES
from ingot.ir.machine.extras import require
from ingot.ir.plugins import user_backends

if TYPE_CHECKING:
    from ingot.backends.entry import CompileSide
    from ingot.ir.backend import Backend


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
        competing={"cuda": REFERENCES},
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
        competing={"cpu": ("cpu", *REFERENCES), "cuda": ("triton", *REFERENCES)},
        links=("torch",),
    ),
    "onnx": BackendEntry(
        emit={"cpu": _emit("onnx.emit:Onnx")},
        costs={"": ClaimCost(1.5, "after regions of inductor, which fuse more; the clock decides for other calls")},
        executable=_late("onnx.load:load"),
        competing={"cpu": REFERENCES},
        links=("onnxruntime",),
        on_request=True,
    ),
    "tensorrt": BackendEntry(
        emit={"cuda": _emit("tensorrt.emit:Tensorrt")},
        costs={"": ClaimCost(0.1, "before all others: the user named it. Nothing has timed it yet")},
        executable=_late("tensorrt.load:load"),
        competing={"cuda": ("triton", *REFERENCES)},
        links=("tensorrt-cu13",),
        on_request=True,
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
    "gloo": BackendEntry(
        emit={"cpu": _emit("gloo.emit:Gloo")},
        costs={"": ClaimCost(0.1, "no other backend computes collectives")},
        collectives=_late("gloo.load:collectives"),
        connect=_late("gloo.load:GlooCommunicator"),
    ),
    "nccl": BackendEntry(
        emit={"cuda": _emit("nccl.emit:NcclBackend")},
        costs={"": ClaimCost(0.1, "no other backend computes collectives")},
        collectives=_late("nccl.load:collectives"),
        connect=_late("nccl.communicator:NcclCommunicator"),
    ),
    "peer": BackendEntry(
        emit={"cuda": _emit("peer.emit:Peer", needs="triton")},
        costs={
            "": ClaimCost(
                0.05,
                "before NCCL: it took 0.33 to 0.81 of its time for two H200s, 8 kB to 64 MB (backends/peer/sizes.py)",
            )
        },
        executable=_late("peer.load:load"),
        joins_collectives=True,
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


def find_entry(name: str) -> BackendEntry | None:
    """Return the entry of a backend of Ingot or of another package; None if there is no such backend.

    Raises UserBackendError if a package defines it, and its entry cannot be used.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    from ingot.backends.outside import outside_entry  # most artifacts need no other package

    return outside_entry(name)


def outside_names() -> tuple[str, ...]:
    """Return the names of the backends of other packages, without importing them. Names of Ingot's own are left out."""
    return tuple(name for name in user_backends() if name not in BACKENDS)


def claim_cost(backend: str, case: str = "") -> float:
    """Return the cost that a backend states for one call. `case` is a key of its `costs`, such as "few tokens"."""
    return BACKENDS[backend].costs[case].cost


def choices(device: str) -> dict[str, tuple[str, ...]]:
    """Return the values of the option --backend on a device ("cpu" or "cuda"), each with the backends that compete.

    The backends of each value together compute every op. Backends of other packages are left out.
    """
    competing = (
        name
        for name, one in BACKENDS.items()
        if not (one.on_request or one.collectives or one.joins_collectives) and device in one.emit
    )
    return {"auto": tuple(competing)} | {
        name: (name, *entry.competing[device]) for name, entry in BACKENDS.items() if device in entry.competing
    }


def collective_competitors(device: str) -> tuple[str, ...]:
    """Return the names of the backends that compete for collectives of a mesh, without being named.

    The device is "cpu" or "cuda". The first one computes all collectives.
    """
    joining = (name for name, one in BACKENDS.items() if one.joins_collectives and device in one.emit)
    return (collective_backend(device), *joining)


def collective_backend(device: str) -> str:
    """Return the name of the backend that connects the ranks of a mesh of devices ("cpu" or "cuda")."""
    return next(name for name, one in BACKENDS.items() if one.connect is not None and device in one.emit)
