"""On which nodes of a cluster the ranks of a mesh run. Importing this imports no Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.ir.errors import TargetError
from ingot.ir.mesh import Mesh, mesh_text, within_stage, world_size


@dataclass(frozen=True)
class Node:
    """A node of a cluster.

    id        its id in Ray
    address   its IPv4 address
    free      the GPUs, or the CPUs, that Ray has not reserved
    whole     all that it has
    """

    id: str
    address: str
    free: int
    whole: int


def lay_out(mesh: Mesh, nodes: Sequence[Node], resource: str) -> list[tuple[Node, tuple[int, ...]]]:
    """Return the nodes of a mesh with the ranks of each, which follow one another.

    The first node is that of this process. It gets rank 0 and as many ranks as fit; so does each node after it, those
    with most room first. Ranks that share layers stay on one node if that is possible.

    mesh       the mesh
    nodes      the nodes of the cluster, that of this process first
    resource   what a rank needs one of: "GPU" or "CPU"

    Raises TargetError if the nodes have too little room, or that of this process has none.
    """
    first, *others = nodes
    ordered = [first, *sorted(others, key=lambda node: -node.free)]  # stable: equal nodes keep Ray's order
    group = world_size(within_stage(mesh))
    for unit in dict.fromkeys((group, 1)):
        found = _filled(ordered, world_size(mesh), unit)
        if found is not None:
            return found
    raise _too_small(mesh, ordered, resource)


def _filled(nodes: Sequence[Node], count: int, unit: int) -> list[tuple[Node, tuple[int, ...]]] | None:
    """Fill nodes in their order, each with a multiple of `unit` ranks. None if not all ranks fit, or none on the first
    node."""
    found: list[tuple[Node, tuple[int, ...]]] = []
    begin = 0
    for node in nodes:
        end = min(count, begin + node.free // unit * unit)
        if end == begin and not found:
            return None
        if end > begin:
            found.append((node, tuple(range(begin, end))))
        begin = end
    return found if begin == count else None


def _too_small(mesh: Mesh, nodes: Sequence[Node], resource: str) -> TargetError:
    count = world_size(mesh)
    each = "; ".join(f"{node.address} has {node.free} free of {node.whole}" for node in nodes)
    free = sum(node.free for node in nodes)
    what = f"the mesh {mesh_text(mesh)} needs {count} {resource}s, and the Ray cluster has {free} free"
    hint = "add nodes to the cluster with `ray start --address=HEAD:6379`, or compile the model for a smaller mesh"
    if free >= count:
        what = f"the node of this process has no free {resource}, and rank 0 of the mesh {mesh_text(mesh)} needs one"
        hint = f"start Ingot on a node that has a free {resource}"
    return TargetError(
        what, where=f"{resource}s of each node: {each}", expected=f"one {resource} for a rank", hint=hint
    )
