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
from ingot.runtime.ranks.host import HostFacts
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule
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
    measuring: MeasuringSchedule | None = None,
) -> Leader:
    """Let the processes of the other ranks of a mesh load their parts, on this host and on others.

    CPU ranks of a host share its memory and its cores. Each GPU rank has a GPU of its own: rank 0 the first one, which
    this process uses anyway. Its context is there.

    artifact      the open artifact, which was compiled for the mesh
    num_pages     the pages of each cache group that the user requests, or None
    memory        the bytes that all ranks together may use; None: what is usual on this machine
    keep_states   reserve slots in which the prefix cache keeps per-sequence states
    capture       when every rank captures CUDA graphs
    phases        records the phases of rank 0
    processes     the processes, if they were started before; None: start them
    clock         measure how long the GPU of each pipeline stage computes
    measuring     which steps the ranks measure; None: none

    Raises TargetError if the GPUs do not suffice or another host differs, ArtifactError if it lacks the artifact,
    OptionError if a rank's part does not fit, and RankError for a fault of another rank.
    """
    device = this_machine(artifact.manifest).device
    here = world_size(mesh) if processes is None else len(processes.hosts[0].ranks)
    gpus = find_rank_gpus(mesh, here) if device == "cuda" else []
    leader = Leader(processes or start_processes(artifact.folder, mesh, device, gpus))
    with leader.loading():
        free, others = None, leader.meet_hosts()
        if device == "cuda":
            with phases.phase("other GPUs"):
                free = leader.free_memory()
        file, limits, room = room_of_ranks(
            artifact,
            mesh,
            num_pages,
            memory,
            keep_states=keep_states,
            capture=capture,
            free=free,
            here=here,
            others=others,
        )
        leader.connect(collective_backend(device), phases)  # after the free memory was read
        cores = [torch.get_num_threads() // here, *(facts.cores // count for count, facts in others)]
        threads = max(1, min(cores))  # equal everywhere: the bits of a sum may depend on it
        leader.decide(
            room, StepSlots.of(file, limits), whole_plans(file), threads, capture, clock=clock, measuring=measuring
        )
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
    here: int | None = None,
    others: Sequence[tuple[int, HostFacts]] = (),
) -> tuple[PlanFile, Limits, Room]:
    """Return the plans of an artifact for a mesh, its limits, and the pages and slots that every rank allocates.

    free     the fewest bytes that are free on the GPU of another rank; None: the ranks share the memory of their hosts
    here     the number of ranks that share the memory of this host; None: all of them
    others   the number of ranks and the facts of each other host

    The other arguments are those of `start_ranks`. Raises OptionError if a rank's part does not fit.
    """
    target = this_machine(artifact.manifest)
    file, count = read_plan_file(artifact), world_size(mesh)
    check_positions(file, mesh)
    each = [file.of(rank.index) for rank in ranks(mesh)]
    limits = read_limits(artifact, each[0])
    if free is None:
        share = _share_of_host(target, each, here or count, others)
    else:
        share = _share_of_gpus(target, each, mesh, free, capture)
    limit = memory // count if isinstance(memory, int) else memory
    return file, limits, find_room(each, limits, share, num_pages, limit, keep_states=keep_states)


# No scratch pages in either: their numbers depend on the caches of a rank, and ranks of other stages have others.


def _share_of_host(
    target: Target, each: Sequence[Plans], count: int, others: Sequence[tuple[int, HostFacts]]
) -> ServingMemory:
    """Return the memory of one of `count` ranks on the CPU of this host, or of a rank on another host if that has less.
    `each` are the plans of each rank."""
    own = target.memory // count
    least = min((own, *(facts.memory // ranks for ranks, facts in others)))

    def share(size: int) -> int:
        return size // count * least // own

    whole = serving_memory(target, each[0], None, capture="none")
    pool = None if whole.pool is None else share(whole.pool)
    return replace(whole, most=share(whole.most), usual=share(whole.usual), pool=pool)


def _share_of_gpus(target: Target, each: Sequence[Plans], mesh: Mesh, free: int, capture: Capture) -> ServingMemory:
    """Return the memory of a rank that every rank has on its own GPU. `each` are the plans of each rank, and `free` is
    what other GPUs have at least."""
    distinct = list({id(one): one for one in each}.values())
    found = [serving_memory(target, one, None, capture=capture) for one in distinct]
    connections = len(mesh) + (STAGES in mesh)  # the endings of stages have one of their own
    unplanned = max(one.unplanned for one in found) + CONNECTION_BYTES * connections
    return replace(found[0], most=min(found[0].most, free), unplanned=unplanned)
