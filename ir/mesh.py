"""A mesh of devices: named axes with sizes, and the ranks on it.

One process compiles for all ranks. A rank learns its index when it loads its weights.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ingot.ir.errors import OptionError

Mesh = Mapping[str, int]
ONE_DEVICE: Mesh = MappingProxyType({})

STAGES = "pp"
# In the order of axes in a mesh: the ranks of one layer are neighbours.
AXIS_MEANINGS: Mapping[str, str] = {
    STAGES: "pipeline parallelism: every rank holds some of the layers, a stage",
    "tp": "tensor parallelism: every rank holds a part of each layer",
}
# Far above one host: the largest NVLink domain has 72 GPUs (NVIDIA GB200 NVL72).
_MAX_RANKS = 1024


@dataclass(frozen=True)
class Rank:
    """One device of a mesh. `index` is its number, counted with the last axis fastest.

    `axes` holds a tuple for each axis of the mesh: (axis name, this rank's index on the axis, axis size).
    """

    index: int
    axes: tuple[tuple[str, int, int], ...]

    def on(self, axis: str) -> tuple[int, int] | None:
        """Return (this rank's index, number of ranks) on a mesh axis; None if the mesh has no such axis."""
        return next(((place, size) for name, place, size in self.axes if name == axis), None)

    @property
    def stage(self) -> int:
        """Return the pipeline stage of this rank; 0 on a mesh without stages."""
        return (self.on(STAGES) or (0, 1))[0]

    @property
    def part(self) -> tuple[int, int]:
        """Return (this rank's index, number of ranks) among the ranks that hold parts of the same layers."""
        index, count = 0, 1
        for axis, place, size in self.axes:
            if axis != STAGES:
                index, count = index * size + place, count * size
        return index, count


def with_rank_rows(sizes: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """Return the sizes of a step's symbols with that of "T_tp": the rows of a rank, if the ranks split the tokens.

    Sizes without "T", and those of a mesh without the axis tp, stay as they are.
    """
    if "T" not in sizes or "tp" not in mesh:
        return dict(sizes)
    return {**sizes, "T_tp": -(-sizes["T"] // mesh["tp"])}


def within_stage(mesh: Mesh) -> dict[str, int]:
    """Return the mesh of the ranks that hold parts of the same layers: `mesh` without pipeline stages."""
    return {axis: size for axis, size in mesh.items() if axis != STAGES}


def world_size(mesh: Mesh) -> int:
    return math.prod(mesh.values())


def ranks(mesh: Mesh) -> tuple[Rank, ...]:
    """Return all ranks of a mesh, ordered by their index."""
    places = itertools.product(*(range(size) for size in mesh.values()))
    return tuple(Rank(index, tuple(zip(mesh, place, mesh.values(), strict=True))) for index, place in enumerate(places))


def groups(mesh: Mesh, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that communicate in a collective over the mesh axis `axis`, as rank indices.

    The ranks of a group differ only in their index on that axis.
    """
    joined: dict[tuple[tuple[str, int, int], ...], list[int]] = {}
    for rank in ranks(mesh):
        joined.setdefault(tuple(item for item in rank.axes if item[0] != axis), []).append(rank.index)
    return tuple(tuple(group) for group in joined.values())


def mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())


def check_mesh(mesh: Mesh) -> dict[str, int]:
    """Check a user's mesh such as {"tp": 2}, and return it without axes of size 1, in the order of AXIS_MEANINGS.

    Raises OptionError for an unknown axis, a size that is no whole number above 0, or more than 1024 ranks.
    """
    for axis, size in mesh.items():
        if axis not in AXIS_MEANINGS:
            raise OptionError(f"unknown mesh axis '{axis}'", expected=", ".join(AXIS_MEANINGS))
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(f"mesh axis {axis} is {size!r}", expected="a whole number above 0")
    if world_size(mesh) > _MAX_RANKS:
        raise OptionError(f"a mesh of {world_size(mesh)} ranks", expected=f"at most {_MAX_RANKS}")
    return {axis: mesh[axis] for axis in AXIS_MEANINGS if mesh.get(axis, 1) > 1}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse a mesh such as "tp=2", and return the size of each axis, by axis name.

    Spaces or commas separate the axes. An empty text means one device. Axes of size 1 are left out. Raises OptionError
    for bad text, an unknown axis or a bad size.
    """
    mesh: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([a-z]+)=(\d{1,9})", part, re.ASCII)
        if match is None or match[1] in mesh:
            raise OptionError(f"the mesh is '{text}'", expected="each axis once with its size, like tp=2")
        mesh[match[1]] = int(match[2])
    return check_mesh(mesh)
