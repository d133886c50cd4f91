"""Start the processes of a mesh from the process of rank 0."""

from dataclasses import replace

import torch

from ingot.ir.artifact.plan import PlanFile
from ingot.ir.mesh import Mesh, ranks, world_size
from ingot.runtime.artifact import Artifact
from ingot.runtime.check_plan import check_positions
from ingot.runtime.check_target import this_machine
from ingot.runtime.limits import Limits, read_limits
from ingot.runtime.plan_file import read_plan_file
from ingot.runtime.ranks.leader import Leader
from ingot.runtime.ranks.seat import check_connects
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.ranks.whole_plans import whole_plans
from ingot.runtime.room import Room, find_room, serving_memory


def start_ranks(
    artifact: Artifact, mesh: Mesh, num_pages: int | None, memory: int | None, *, keep_states: bool
) -> Leader:
    """Start the processes of the other ranks of a mesh, all on this machine. The ranks share its memory and its cores.

    artifact      the open artifact, which was compiled for the mesh
    num_pages     the pages of each cache group that the user requests, or None
    memory        the bytes that all ranks together may use; None: what is usual on this machine
    keep_states   reserve slots in which the prefix cache keeps per-sequence states

    Raises TargetError if no backend connects such devices, and OptionError if a rank's part does not fit.
    """
    backend = check_connects(mesh, this_machine(artifact.manifest).device)
    file, limits, room = room_of_ranks(artifact, mesh, num_pages, memory, keep_states=keep_states)
    threads = max(1, torch.get_num_threads() // world_size(mesh))
    return Leader(artifact.folder, mesh, backend, room, StepSlots.of(file, limits), whole_plans(file), threads)


def room_of_ranks(
    artifact: Artifact, mesh: Mesh, num_pages: int | None, memory: int | None, *, keep_states: bool
) -> tuple[PlanFile, Limits, Room]:
    """Return the plans of an artifact for a mesh, its limits, and the pages and slots that every rank allocates.

    The arguments are those of `start_ranks`. Raises OptionError if a rank's part does not fit.
    """
    target = this_machine(artifact.manifest)
    file, count = read_plan_file(artifact), world_size(mesh)
    check_positions(file, mesh)
    each = [file.of(rank.index) for rank in ranks(mesh)]
    limits = read_limits(artifact, each[0])
    # No scratch pages: their numbers depend on the caches of a rank, and ranks of other stages have others.
    whole = serving_memory(target, each[0], None, capture="none")
    share = replace(
        whole,
        most=whole.most // count,
        usual=whole.usual // count,
        pool=None if whole.pool is None else whole.pool // count,
    )
    limit = memory // count if isinstance(memory, int) else memory
    return file, limits, find_room(each, limits, share, num_pages, limit, keep_states=keep_states)
