"""Find why two artifacts, or an artifact and a compile request, differ: in their inputs, files and executables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.debug.identity_diff import Change, Document, changes
from ingot.ir.artifact.digest import CHUNK_BYTES, digest_json
from ingot.ir.artifact.manifest import EXECUTABLES, REQUEST
from ingot.ir.errors import ArtifactError
from ingot.runtime.artifact import Artifact


@dataclass(frozen=True)
class NotShared:
    """Executables that only one of two artifacts has: the executable keys in `a` and in `b`, and the fields in which
    they differ. Executables without a counterpart in the other artifact have no `changes`."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        return {"a": list(self.a), "b": list(self.b), "changes": [change.to_json() for change in self.changes]}


@dataclass(frozen=True)
class Miss:
    """The differences between two compile requests, and between the artifacts made from them.

    `keys` are the two request keys, equal for equal requests. `changes` are the inputs that differ, causes first.
    `builds` are the two build ids. `file` is the first difference between the artifacts' contents, empty if there is
    none. `shared` counts the executables that both have; `not_shared` lists the others. For a request that was not
    compiled, `builds` is None.
    """

    keys: tuple[str, str]
    changes: tuple[Change, ...]
    builds: tuple[str, str] | None = None
    file: str = ""
    shared: int = 0
    not_shared: tuple[NotShared, ...] = ()

    @property
    def causes(self) -> tuple[Change, ...]:
        """Return the changes of inputs that no other change causes."""
        return tuple(change for change in self.changes if not change.follows)

    def __bool__(self) -> bool:
        """Return whether the requests differ."""
        return self.keys[0] != self.keys[1]

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "request_keys": list(self.keys),
            "same_request": not self,
            "changes": [change.to_json() for change in self.changes],
        }
        if self.builds is not None:
            value |= {
                "build_ids": list(self.builds),
                "same_build": self.builds[0] == self.builds[1],
                "first_difference": self.file or None,
                "executables": {"shared": self.shared, "not_shared": [one.to_json() for one in self.not_shared]},
            }
        return value


def why_miss(a: Artifact, b: Artifact) -> Miss:
    """Return why artifact `b` was compiled although artifact `a` existed: how requests, contents and executables
    differ. Raises ArtifactError if one does not record its request."""
    mine, theirs = _executables(a), _executables(b)
    return replace(
        why_requests_differ(identity_of(a), identity_of(b)),
        builds=(a.build_id, b.build_id),
        file=first_difference(a, b),
        shared=len(mine.keys() & theirs.keys()),
        not_shared=executables_not_shared(mine, theirs),
    )


def why_requests_differ(a: Document, b: Document) -> Miss:
    """Return the differences between two compile requests, given as identity documents."""
    return Miss((digest_json(a), digest_json(b)), tuple(changes(a, b)))


def identity_of(artifact: Artifact) -> Document:
    """Return the artifact's identity document, the JSON data that its request key is the digest of. Raises
    ArtifactError if the digest does not match."""
    stored = artifact.read_json(REQUEST)
    document = stored.get("identity") if isinstance(stored, dict) else None
    if not isinstance(document, dict) or digest_json(document) != artifact.manifest.request_key:
        raise ArtifactError(
            f"{REQUEST} does not match the request key",
            where=str(artifact.folder),
            hint="compile the model again",
        )
    return document


def _executables(artifact: Artifact) -> Mapping[str, Document]:
    stored = artifact.read_json(EXECUTABLES)
    if not isinstance(stored, dict) or stored.keys() != set(artifact.manifest.exe_keys):
        raise ArtifactError(f"{EXECUTABLES} is malformed", where=str(artifact.folder), hint="compile the model again")
    return stored


# Executables.


def executables_not_shared(a: Mapping[str, Document], b: Mapping[str, Document]) -> tuple[NotShared, ...]:
    """Return the executables that only `a` or only `b` has, each paired with its nearest counterpart. Pairs with equal
    changes are grouped. Both arguments map executable keys to identity documents."""
    mine = {key: document for key, document in a.items() if key not in b}
    theirs = {key: document for key, document in b.items() if key not in a}
    groups: dict[tuple[str, ...], list[tuple[str, str, tuple[Change, ...]]]] = {}
    while mine and theirs:
        mine_key, their_key = min(
            ((one, other) for one in mine for other in theirs),
            key=lambda pair: (_distance(mine[pair[0]], theirs[pair[1]]), pair),
        )
        found = tuple(_exe_changes(mine.pop(mine_key), theirs.pop(their_key)))
        groups.setdefault(tuple(map(str, found)), []).append((mine_key, their_key, found))
    paired = [
        NotShared(tuple(one for one, _, _ in group), tuple(other for _, other, _ in group), group[0][2])
        for group in groups.values()
    ]
    alone = [NotShared(tuple(mine), (), ())] * bool(mine) + [NotShared((), tuple(theirs), ())] * bool(theirs)
    return (*paired, *alone)


def _distance(a: Document, b: Document) -> tuple[int, int]:
    """Return how different two executables are, for sorting: first whether their backends differ, then the number of
    different lines of their bodies."""
    lines, others = set(a["body"] or ()), set(b["body"] or ())
    return int(a["backend"] != b["backend"] or (a["body"] is None) != (b["body"] is None)), len(lines ^ others)


def _exe_changes(a: Document, b: Document) -> list[Change]:
    """Return the changes between the identity documents of two executables. Of their bodies, only the first line that
    differs is reported."""
    found = changes({**a, "body": None}, {**b, "body": None})
    lines, others = a["body"] or [], b["body"] or []
    if lines == others:
        return found
    number = next((i for i, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]), None)
    if number is None:
        return [Change("body", f"{len(lines)} lines", f"{len(others)} lines"), *found]
    return [Change(f"body line {number + 1}", lines[number], others[number]), *found]


# Contents.


def first_difference(a: Artifact, b: Artifact) -> str:
    """Return the first file in which two artifacts differ, with the field, line or chunk. If all files are equal,
    return the first field of the manifest that differs. Empty for equal builds."""
    if a.build_id == b.build_id:
        return ""
    mine = {entry.path: entry for entry in a.manifest.files}
    theirs = {entry.path: entry for entry in b.manifest.files}
    for path in sorted(mine.keys() | theirs.keys()):
        if path not in theirs or path not in mine:
            return f"{path} (only in {'A' if path in mine else 'B'})"
        if mine[path] != theirs[path]:
            return f"{path}{_within(a, b, path)}"
    without_files = ({**one.manifest.model_dump(mode="json"), "files": None} for one in (a, b))
    return f"manifest.json: {changes(*without_files)[0]}"


def _within(a: Artifact, b: Artifact, path: str) -> str:
    if path.endswith(".json"):
        found = _first_value("", a.read_json(path), b.read_json(path))
        return f": {found}" if found else ""
    if path.endswith((".ir", ".delta")):
        lines, others = (one.read_text(path).split("\n") for one in (a, b))
        pairs = enumerate(zip(lines, others, strict=False), 1)
        number = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(lines), len(others)) + 1)
        return f", line {number}"
    chunks, others_chunks = (next(entry.chunks for entry in one.manifest.files if entry.path == path) for one in (a, b))
    pairs = enumerate(zip(chunks, others_chunks, strict=False))
    index = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(chunks), len(others_chunks)))
    return f", from byte {index * CHUNK_BYTES} on" if max(len(chunks), len(others_chunks)) > 1 else ""


def _first_value(path: str, a: object, b: object) -> str:
    """Return the path and both values of the first difference between two JSON values. Empty for equal values. `path`
    is the path of the two values themselves."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            inner = f"{path}.{key}" if path else key
            if key not in a or key not in b:
                return f"{inner} (only in {'A' if key in a else 'B'})"
            if found := _first_value(inner, a[key], b[key]):
                return found
        return ""
    if isinstance(a, list) and isinstance(b, list):
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            if found := _first_value(f"{path}[{index}]", one, other):
                return found
        return "" if len(a) == len(b) else f"{path}: {len(a)} -> {len(b)} items"
    return "" if a == b and type(a) is type(b) else str(Change(path, a, b))
