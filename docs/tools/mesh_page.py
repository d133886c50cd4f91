"""The part of docs/benchmarks.md on more GPUs than were measured: the estimates of benchmarks/more_gpus.py."""

from collections.abc import Iterator

from markdown_table import table
from more_gpus import SIZES, Estimate, estimates
from results import Result
from units import quantity

TITLE = "Estimates of an 8B on four and eight H200s"
HEAD = """\
`python benchmarks/more_gpus.py`, from [mesh_8b.json](../benchmarks/results/mesh_8b.json) and
[collectives.json](../benchmarks/results/collectives.json). Times of one and two GPUs were measured, and the others are
the sum of the parts in brackets: reading or computing, all-reduces, and what is left of the measured time of two GPUs.
"""


def mesh_section(mesh: Result, collectives: Result) -> Iterator[str]:
    """Yield the table of estimates from a result of mesh.py and one of kernels/collectives.py."""
    yield HEAD
    head = ("", *(f"{gpus} GPU{'s, measured' if gpus == 2 else 's' * (gpus > 1)}" for gpus in SIZES))
    yield from table(head, (_row(one) for one in estimates(mesh, collectives)))


def _row(one: Estimate) -> Iterator[str]:
    yield one.what
    for place, gpus in enumerate(SIZES):
        shown = quantity(one.seconds[place], "s")
        parts = " + ".join(quantity(part[place], "s") for part in (one.read, one.sums, one.between))
        yield shown if gpus == 1 else f"{shown} ({parts}), {one.seconds[0] / one.seconds[place]:.2f} ×"
