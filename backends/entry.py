"""The description of a backend: the devices that it supports, and functions that import its code when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ingot.ir.artifact.plan import Executable
    from ingot.ir.backend import Backend
    from ingot.ir.machine.load_context import Communicator, LoadContext
    from ingot.ir.machine.meeting import MeetingPlace
    from ingot.ir.plugins import Package

    CompileSide = Callable[[str], Backend]
    LoadedCall = Callable[..., Sequence[torch.Tensor]]
    Op = Callable[..., Any]
    LoadExecutable = Callable[[Executable, Path, LoadContext], LoadedCall]
    LoadLibrary = Callable[[Executable, Path, LoadContext], Mapping[str, Op]]
    FindOp = Callable[[str], Op | None]
    Collectives = Callable[[LoadContext], Mapping[str, Op]]
    Connect = Callable[[MeetingPlace, str, int, int], Communicator]


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
      nothing else: it joins the others of a compile for a mesh. If `--backend` names it, it computes all collectives.
    - `joins_collectives`: it competes with that backend for some collectives, without being named.
    - `connect`: connects the ranks of a mesh axis. It takes the place where they meet, the group's name, this rank's
      index on the axis, and the number of ranks.
    - `on_request`: it competes only if `--backend` names it.
    - `package`: the package that the backend belongs to; None for Ingot's own.
    - `modules`: the modules of that package whose files determine the compiled code.
    """

    emit: Mapping[str, CompileSide]
    costs: Mapping[str, ClaimCost] = field(default_factory=dict)
    executable: LoadExecutable | None = None
    library: LoadLibrary | None = None
    find_op: FindOp | None = None
    competing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    collectives: Collectives | None = None
    joins_collectives: bool = False
    connect: Connect | None = None
    on_request: bool = False
    package: Package | None = None
    modules: tuple[str, ...] = ()
