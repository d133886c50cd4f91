"""Compare two artifacts, two steps of a compile, or two program texts."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ingot.debug.sides import ProgramKey, Side
from ingot.ir.artifact.manifest import WEIGHTS_FOLDER, WeightEntry
from ingot.ir.artifact.plan import ALL, Plan
from ingot.ir.artifact.trace import trace_name
from ingot.ir.diff import ABSENT, Difference, ProgramDiff, diff_programs
from ingot.ir.errors import ArtifactError
from ingot.ir.program import Program
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.plan_file import read_plan_file

_WEIGHTS = TypeAdapter(dict[str, WeightEntry])


@dataclass(frozen=True)
class PairDiff:
    """The difference between two programs of one entry (such as `main`) and bucket class (a range of step sizes). True
    if they differ.

    `before` and `after` are the programs' names in `ingot inspect`. The name is None if that artifact lacks the
    program. Then the pair counts as different, although `diff` is empty.
    """

    before: str | None
    after: str | None
    diff: ProgramDiff

    def __bool__(self) -> bool:
        return bool(self.diff) or self.before is None or self.after is None

    @property
    def title(self) -> str:
        names = dict.fromkeys(name or "main" for name in (self.before, self.after) if name is not None)
        return " -> ".join(names)

    def to_json(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, **self.diff.to_json(), "equal": not self}


@dataclass(frozen=True)
class SidesDiff:
    """All differences between two artifacts, two steps of a compile, or two program files. True if there are any.

    `before` and `after` are the names of what was compared. `facts` are differences in manifests, plans and weights.
    `programs` are the compared pairs of programs.
    """

    before: str
    after: str
    facts: tuple[Difference, ...]
    programs: tuple[PairDiff, ...]

    def __bool__(self) -> bool:
        return bool(self.facts) or any(self.programs)

    def to_json(self) -> dict[str, Any]:
        facts = [
            {
                "what": one.what,
                "before": one.before,
                "after": one.after,
                "field": one.field,
                "old": one.old,
                "new": one.new,
            }
            for one in self.facts
        ]
        return {
            "equal": not self,
            "before": self.before,
            "after": self.after,
            "facts": facts,
            "programs": [pair.to_json() for pair in self.programs],
        }


def diff_sides(before: Side, after: Side) -> SidesDiff:
    """Compare two artifacts, two steps of a compile, or two program files.

    Programs of the same entry (such as `main`) and bucket class (a range of step sizes) are compared. A program from
    before the split into classes is compared with the programs of all classes. If both sides are whole artifacts, their
    manifests, plans and weights are compared too.
    """
    one, other = before.programs, after.programs
    pairs = tuple(
        _pair(one.get(left) if left else None, other.get(right) if right else None, left, right)
        for left, right in _pairs_of_keys(one, other)
    )
    facts: list[Difference] = []
    if before.artifact is not None and after.artifact is not None:
        facts += _manifest_facts(before.artifact, after.artifact)
        facts += _compared("plan", _plan_facts(before.artifact), _plan_facts(after.artifact))
        facts += _weight_facts(before.artifact, after.artifact)
    return SidesDiff(before.label, after.label, tuple(facts), pairs)


def _pair(before: Program | None, after: Program | None, left: ProgramKey | None, right: ProgramKey | None) -> PairDiff:
    diff = diff_programs(before, after) if before is not None and after is not None else ProgramDiff()
    return PairDiff(_name(left), _name(right), diff)


def _name(key: ProgramKey | None) -> str | None:
    return trace_name(*key) if key is not None else None


def _pairs_of_keys(
    before: Iterable[ProgramKey], after: Iterable[ProgramKey]
) -> Iterator[tuple[ProgramKey | None, ProgramKey | None]]:
    """Yield the pairs of programs to compare, each program as its key.

    A key is the entry (such as `main`) and the bucket class (a range of step sizes). If only one side has a program,
    the other item of the pair is None.
    """
    ours, theirs = list(before), list(after)
    if len(ours) == len(theirs) == 1:
        yield ours[0], theirs[0]
        return
    for entry in dict.fromkeys(entry for entry, _ in (*ours, *theirs)):
        left = [key for key in ours if key[0] == entry]
        right = [key for key in theirs if key[0] == entry]
        if left and right and [(entry, None)] in (left, right):
            yield from itertools.product(left, right)
        else:
            for key in dict.fromkeys([*left, *right]):
                yield key if key in left else None, key if key in right else None


def _compared(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(what, "", "", name, before.get(name, ABSENT), after.get(name, ABSENT))
        for name in dict.fromkeys([*before, *after])
        if before.get(name, ABSENT) != after.get(name, ABSENT)
    ]


def _manifest_facts(before: Artifact, after: Artifact) -> list[Difference]:
    found = []
    for what in ("model", "target", "versions"):
        one, other = (
            {name: _text(value) for name, value in getattr(artifact.manifest, what).items()}
            for artifact in (before, after)
        )
        found += _compared(what, one, other)
    return found


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _plan_facts(artifact: Artifact) -> dict[str, str]:
    """Return facts of an artifact's plans that its programs do not show, as texts.

    The facts are memory, numbers of instructions, and the backends of executables. Keys are names such as "main memory
    outputs".
    """
    facts: dict[str, str] = {}
    for position, plans in read_plan_file(artifact).positions.items():
        at = "" if position == ALL else f"{position} "
        for entry, plan in plans.plans.items():
            facts |= {f"{at}{trace_name(entry, None) or 'main'} {name}": text for name, text in _of_plan(plan)}
    return facts


def _of_plan(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, size in plan.memory.model_dump().items():
        yield f"memory {name}", str(size)
    for bucket in plan.buckets:
        name = bucket.bucket.name
        yield f"{name} instructions", str(len(bucket.instructions))
        yield f"{name} activations", str(bucket.memory.activations)
        yield f"{name} largest step", ", ".join(f"{dim}={size}" for dim, size in sorted(bucket.memory.sizes.items()))
    for one in (*plan.executables.values(), *plan.libraries.values()):
        yield f"executable {one.id}", one.backend


def _weight_facts(before: Artifact, after: Artifact) -> list[Difference]:
    """Return the differences between the weights of two artifacts: weights with another type or recipe.

    A weight that only has another name is no difference. If there are no differences, but the weight files differ,
    return one difference that says so.
    """
    one, other = _weights(before), _weights(after)
    made = [set(weights.values()) for weights in (one, other)]
    found = []
    for name in dict.fromkeys([*one, *other]):
        old, new = one.get(name, ABSENT), other.get(name, ABSENT)
        if (old not in made[1] and old != ABSENT) or (new not in made[0] and new != ABSENT):
            found.append(Difference("weight", name if name in one else "", name if name in other else "", "", old, new))
    if not found and _digests(before) != _digests(after):
        builds = f"build {before.build_id[:12]}", f"build {after.build_id[:12]}"
        found.append(Difference("weights", "", "", "contents", builds[0], builds[1]))
    return found


def _weights(artifact: Artifact) -> dict[str, str]:
    """Return a mapping from the name of each weight to a text: dtype, shape, placement on the mesh, and recipe."""
    try:
        entries = _WEIGHTS.validate_json(artifact.read_text("weights.json"))
    except ValidationError as error:
        raise _malformed("weights.json", error, artifact) from None
    return {
        name: f"{one.dtype}[{', '.join(map(str, one.shape))}] {' '.join(one.shard)} = {one.recipe}"
        for name, one in entries.items()
    }


def _digests(artifact: Artifact) -> list[tuple[str, ...]]:
    return sorted(entry.chunks for entry in artifact.manifest.files if entry.path.startswith(WEIGHTS_FOLDER))


def _malformed(file: str, error: ValidationError, artifact: Artifact) -> ArtifactError:
    first = error.errors()[0]
    return ArtifactError(
        f"{file}, field {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(artifact.folder)
    )
