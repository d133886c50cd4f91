"""The bytes that each rank must send in a collective, and the time that a link needs for them."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from torch import fx

from ingot.debug.mesh_time.times import Collective
from ingot.debug.step_time.work import inner_calls
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpu_times import H200_TIMES
from ingot.ir.mesh import Mesh
from ingot.ir.ops import op_of
from ingot.ir.program import Program, held_type, named_arguments

# By op: the bytes that each of n ranks must send at least, as a multiple of the bytes of its argument. A reduction
# sends the parts of all other ranks; a gathering, its own part to each of them, perhaps through others. These are the
# bounds of ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
LEAST_SENT: Mapping[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
}


def collective_in(
    node: fx.Node, program: Program, sizes: Mapping[str, int], mesh: Mesh, link: int | None
) -> Collective | None:
    """Return what the ranks exchange in a call; None if it needs no other rank.

    sizes   the sizes of symbols such as "T"
    link    the bandwidth between two devices in bytes a second; None if it is not known
    """
    found, axis, sent = list[str](), "", 0
    for one in inner_calls(node, program):
        op = op_of(one.target)
        if op is None or op.name not in LEAST_SENT:
            continue
        call = named_arguments(one)
        value_type, axis = held_type(call["x"]), str(call["axis"])
        size = math.prod(value_type.bind(sizes)) * value_type.dtype.itemsize
        found.append(op.name)
        sent += math.ceil(LEAST_SENT[op.name](mesh[axis]) * size)
    if not found:
        return None
    return Collective(" + ".join(dict.fromkeys(found)), axis, sent, None if link is None else sent / link)


def link_bandwidth(device: str) -> int | None:
    """Return the measured bytes a second from one device of a mesh to another; None if it is not known.

    `device` is the type of the devices, such as "cuda". The GPU of this process stands for all of them.
    """
    if device != "cuda":
        return None
    gpu = find_gpu()
    return H200_TIMES.link if gpu.links and gpu.product == H200_TIMES.gpu.product else None
