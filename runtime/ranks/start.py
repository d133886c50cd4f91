"""Start a mesh from the process of rank 0: what its ranks decide together, before each loads its part."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ingot.backends.table import collective_backend
from ingot.ir.artifact.plan import PlanFile, Plans
from ingot.ir.machine.target import Target
from ingot.ir.mesh import STAGES, Mesh, ranks, world_size
from ingot.runtime.cuda.graphs.choice import Capture
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.check_plan import check_positions
from ingot.runtime.loading.check_target import this_machine
from ingot.runtime.loading.limits import Limits, read_limits
from ingot.runtime.loading.memory import ServingMemory
from ingot.runtime.loading.phases import Phases
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.loading.room import Room, find_room, serving_memory
from ingot.runtime.ranks.gpus import CONNECTION_BYTES, find_rank_gpus
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.ranks.processes import RankProcesses, start_processes
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.ranks.whole_plans import whole_plans


def start_ranks(
    artifact: Artifact,
    mesh: Mesh,
    num_pages: int | None,
    memory: int | None,
    *,
    keep_states: bool,
    capture: Capture,
    phases: Phases,
    processes: RankProcesses | None = None,
    clock: bool = False,
) -> Leader:
    """Let the processes of the other ranks of a mesh load their parts, all on this machine.

    CPU ranks share its memory and its cores. Each GPU rank has a GPU of its own: rank 0 the first one, which this
    process uses anyway. Its context is there.

    artifact      the open artifact, which was compiled for the mesh
    num_pages     the pages of each cache group that the user requests, or None
    memory        the bytes that all ranks together may use; None: what is usual on this machine
    keep_states   reserve slots in which the prefix cache keeps per-sequence states
    capture       when every rank captures CUDA graphs
    phases        records the phases of rank 0
    processes     the processes, if they were started before; None: start them
    clock         measure how long the GPU of each pipeline stage computes

    Raises TargetError if the GPUs do not suffice, OptionError if a rank's part does not fit, and RankError for a fault
    of another rank.
    """
    device = this_machine(artifact.manifest).device
    gpus = find_rank_gpus(mesh) if device == "cuda" else []
    leader = Leader(processes or start_processes(artifact.folder, mesh, device, gpus))
    with leader.loading():
        free = None
        if device == "cuda":
            with phases.phase("other GPUs"):
                free = leader.free_memory()
        file, limits, room = room_of_ranks(
            artifact, mesh, num_pages, memory, keep_states=keep_states, capture=capture, free=free
        )
        leader.connect(collective_backend(device), phases)  # after the free memory was read
        threads = max(1, torch.get_num_threads() // world_size(mesh))
        leader.decide(room, StepSlots.of(file, limits), whole_plans(file), threads, capture, clock=clock)
    return leader


def room_of_ranks(
    artifact: Artifact,
    mesh: Mesh,
    num_pages: int | None,
    memory: int | None,
    *,
    keep_states: bool,
    capture: Capture = "none",
    free: int | None = None,
) -> tuple[PlanFile, Limits, Room]:
    """Return the plans of an artifact for a mesh, its limits, and the pages and slots that every rank allocates.

    `free` is the fewest bytes that are free on the GPU of another rank; None: the ranks share the memory of this
    machine. The other arguments are those of `start_ranks`. Raises OptionError if a rank's part does not fit.
    """
    target = this_machine(artifact.manifest)
    file, count = read_plan_file(artifact), world_size(mesh)
    check_positions(file, mesh)
    each = [file.of(rank.index) for rank in ranks(mesh)]
    limits = read_limits(artifact, each[0])
    share = _share_of_host(target, each, count) if free is None else _share_of_gpus(target, each, mesh, free, capture)
    limit = memory // count if isinstance(memory, int) else memory
    return file, limits, find_room(each, limits, share, num_pages, limit, keep_states=keep_states)


# No scratch pages in either: their numbers depend on the caches of a rank, and ranks of other stages have others.


def _share_of_host(target: Target, each: Sequence[Plans], count: int) -> ServingMemory:
    """Return the memory of one of `count` ranks on the CPU of this machine. `each` are the plans of each rank."""
    whole = serving_memory(target, each[0], None, capture="none")
    return replace(
        whole,
        most=whole.most // count,
        usual=whole.usual // count,
        pool=None if whole.pool is None else whole.pool // count,
    )


def _share_of_gpus(target: Target, each: Sequence[Plans], mesh: Mesh, free: int, capture: Capture) -> ServingMemory:
    """Return the memory of a rank that every rank has on its own GPU. `each` are the plans of each rank, and `free` is
    what other GPUs have at least."""
    distinct = list({id(one): one for one in each}.values())
    found = [serving_memory(target, one, None, capture=capture) for one in distinct]
    connections = len(mesh) + (STAGES in mesh)  # the endings of stages have one of their own
    unplanned = max(one.unplanned for one in found) + CONNECTION_BYTES * connections
    return replace(found[0], most=min(found[0].most, free), unplanned=unplanned)
