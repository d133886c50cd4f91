"""Compare two programs by meaning: by the values that they compute, not by names, order or spelling.

Inputs, outputs and states are identified by name. A param is identified by its recipe, type and placement; a call by
its op, constants, arguments, backend and region. A difference that only follows from an earlier one, such as the types
after a changed cast, is not listed. Equal values are one value, but calls are counted. A column-major weight that is
read through a view differs only in its layout. The executables of regions and the plan are not part of the meaning.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from ingot.ir.diff.align import align
from ingot.ir.diff.compare import Comparison
from ingot.ir.diff.difference import ABSENT, Difference, ProgramDiff
from ingot.ir.diff.flat import flatten
from ingot.ir.diff.identity import Ids, identify
from ingot.ir.diff.regions import align_groups, region_changes, signature_changes, whole_region
from ingot.ir.mesh import mesh_text
from ingot.ir.program import Program
from ingot.ir.text import bucket_text

__all__ = ["ABSENT", "Difference", "ProgramDiff", "diff_programs"]


def diff_programs(before: Program, after: Program) -> ProgramDiff:
    """Return what two programs compute differently.

    The result is falsy if there are no differences: `if not diff_programs(a, b)`. Raises VerifyError if the call of a
    region (calls that are compiled together) does not fit the region's inputs.
    """
    one, other, ids = flatten(before), flatten(after), Ids()
    identify(one, ids)
    identify(other, ids)
    pairs = align(one, other)
    groups = align_groups(one, other, pairs)
    compared = Comparison(one, other, pairs)
    kept = set(groups.values())
    gone = [whole_region(group, removed=True) for group in one.groups if group not in groups]
    new = [whole_region(group, removed=False) for group in other.groups if group not in kept]
    found = ProgramDiff(
        changed=_joined([*compared.changes(), *compared.outputs(), *region_changes(groups, pairs)]),
        added=_joined([*compared.added(), *new]),
        removed=_joined([*compared.removed(), *gone]),
        header=tuple(_header(before, after)),
    )
    return found or ProgramDiff(changed=_joined(signature_changes(groups)))


def _joined(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """Merge equal differences of several layers into one difference that names all these layers.

    Layers can share a region (calls that are compiled together). Each of them then reports the differences inside it.
    Other differences are not merged.
    """
    kept: dict[Hashable, Difference] = {}
    for number, one in enumerate(found):
        key = replace(one, layers=(), origin="") if one.region else number
        if key in kept:
            one = replace(kept[key], layers=tuple(sorted({*kept[key].layers, *one.layers})))
        kept[key] = one
    return tuple(kept.values())


def _header(before: Program, after: Program) -> Iterator[Difference]:
    one, other = _facts(before), _facts(after)
    for name in dict.fromkeys([*one, *other]):
        old, new = one.get(name, ABSENT), other.get(name, ABSENT)
        if old != new:
            yield Difference("program", before.name, after.name, name, old, new)


def _facts(program: Program) -> dict[str, str]:
    """Return the properties of a whole program as text, by name.

    They are the pipeline stage, the bucket class (range of step sizes), the mesh, and the bounds of symbols.
    """
    found = {"stage": program.stage.name}
    if program.bucket is not None:
        features = tuple(sorted(program.bucket.features))
        found["bucket"] = bucket_text(program.bucket.model_copy(update={"features": features}))
    if program.mesh:
        found["mesh"] = mesh_text(program.mesh)
    return found | {f"dim {dim.name}": f"[{dim.lo}, {dim.hi}]" for dim in program.dims.values()}
