"""The GPUs of a mesh: each rank has one of the GPUs that rank 0 can use, and all are equal."""

import itertools
import logging
import os
from collections.abc import Sequence

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpus, reaches
from ingot.ir.machine.gpus import GPU_VARIABLE, Gpu, visible_gpus
from ingot.ir.mesh import Mesh, groups, mesh_text, world_size

# NCCL's buffers for each group that a rank is in. An allowance, not measured separately.
CONNECTION_BYTES = 512 << 20

log = logging.getLogger("ingot.ranks")


def find_rank_gpus(mesh: Mesh, here: int | None = None) -> list[str]:
    """Return the name of each rank's GPU on this host, as CUDA_VISIBLE_DEVICES takes it. Logs a warning for GPUs that
    cannot access each other's memory.

    `here` is the number of ranks on this host, the first ones of the mesh; None: all. Raises TargetError if there are
    fewer GPUs than that, or GPUs of two kinds.
    """
    gpus, count = find_gpus(), here or world_size(mesh)
    check_gpus(mesh, gpus, count)
    for one, other in unlinked(mesh, count):
        log.warning(
            "the GPUs of rank %d and rank %d cannot access each other's memory: NCCL copies through the host, slower",
            one,
            other,
        )
    return visible_gpus(len(gpus), os.environ.get(GPU_VARIABLE))[:count]


def check_gpus(mesh: Mesh, gpus: Sequence[Gpu], here: int | None = None) -> None:
    """Raise TargetError if the ranks of a mesh on this host cannot run on these GPUs. `here` is their number; None: all
    ranks."""
    whole = world_size(mesh)
    count = here or whole
    if count > len(gpus):
        raise TargetError(
            f"the artifact was compiled for {whole} ranks ({mesh_text(mesh)}), and this process can use {len(gpus)} "
            + ("GPU" if len(gpus) == 1 else "GPUs"),
            expected=f"at least {count} GPUs, one for each rank" + (" on this host" if count < whole else ""),
            hint=f"compile the model for a smaller mesh, or let {GPU_VARIABLE} name more GPUs",
        )
    first = gpus[0]
    for index, gpu in enumerate(gpus[:count]):
        if (gpu.product, gpu.sm, gpu.memory) != (first.product, first.sm, first.memory):
            raise TargetError(
                f"the GPUs of rank 0 and rank {index} differ: {_text(first)}, and {_text(gpu)}",
                expected="equal GPUs for all ranks",
                hint=f"let {GPU_VARIABLE} name equal GPUs",
            )


def unlinked(mesh: Mesh, here: int | None = None) -> list[tuple[int, int]]:
    """Return the pairs of the first `here` ranks that communicate, and whose GPUs cannot access each other's memory.
    None: of all ranks."""
    count = here or world_size(mesh)
    pairs = {
        pair for axis in mesh for members in groups(mesh, axis) for pair in itertools.combinations(sorted(members), 2)
    }
    local = [pair for pair in sorted(pairs) if max(pair) < count]
    return [pair for pair in local if not (reaches(*pair) and reaches(*reversed(pair)))]


def _text(gpu: Gpu) -> str:
    return f"{gpu.product} (sm_{gpu.sm}, {gpu.memory / 1e9:.0f} GB)"
