"""Find why two artifacts, or an artifact and a compile request, differ: in their inputs, files and executables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.debug.identity_diff import Change, Document, changes
from ingot.ir.artifact.digest import CHUNK_BYTES, digest_json
from ingot.ir.artifact.documents import decode_documents
from ingot.ir.artifact.manifest import EXECUTABLES, REQUEST
from ingot.ir.errors import ArtifactError
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class NotShared:
    """Executables (compiled regions or calls) that only one of two artifacts has.

    `a` and `b` are the keys of the executables in the compile cache, from the first and the second artifact. `changes`
    are the fields in which each executable in `a` differs from the most similar one in `b`. It is empty if there is
    none to compare with.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        return {"a": list(self.a), "b": list(self.b), "changes": [change.to_json() for change in self.changes]}


@dataclass(frozen=True)
class Miss:
    """Why two compiles did not share a result. It has the differences between their requests and between their
    artifacts.

    keys         the keys of both requests in the compile cache, equal for equal requests
    changes      the inputs of the compile that differ, causes before effects
    builds       the build ids of both artifacts; None if a request was not compiled
    file         the first difference between the artifacts' contents; "" if there is none
    shared       the number of executables that both artifacts have
    not_shared   the executables that only one of them has
    """

    keys: tuple[str, str]
    changes: tuple[Change, ...]
    builds: tuple[str, str] | None = None
    file: str = ""
    shared: int = 0
    not_shared: tuple[NotShared, ...] = ()

    @property
    def causes(self) -> tuple[Change, ...]:
        """Return the changed inputs that no other change caused."""
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
    """Return why artifact `b` was compiled although artifact `a` existed.

    The result has the differences between their requests, contents and executables. Raises ArtifactError if an artifact
    does not record its request.
    """
    mine, theirs = _executables(a), _executables(b)
    return replace(
        why_requests_differ(identity_of(a), identity_of(b)),
        builds=(a.build_id, b.build_id),
        file=first_difference(a, b),
        shared=len(mine.keys() & theirs.keys()),
        not_shared=executables_not_shared(mine, theirs),
    )


def why_requests_differ(a: Document, b: Document) -> Miss:
    """Return the differences between two compile requests.

    A request is given as a JSON document with all inputs of the compile. Its digest is the request's key in the compile
    cache.
    """
    return Miss((digest_json(a), digest_json(b)), tuple(changes(a, b)))


def identity_of(artifact: Artifact) -> Document:
    """Return all inputs of an artifact's compile, as a JSON document.

    The digest of this document is the artifact's key in the compile cache. Raises ArtifactError if it does not match
    that key.
    """
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
    try:
        found = decode_documents(artifact.read_json(EXECUTABLES))
    except ValueError as error:
        raise ArtifactError(
            f"{EXECUTABLES} is malformed: {error}", where=str(artifact.folder), hint="compile the model again"
        ) from None
    if found.keys() != set(artifact.manifest.exe_keys):
        raise ArtifactError(f"{EXECUTABLES} is malformed", where=str(artifact.folder), hint="compile the model again")
    return found


# Executables.


def executables_not_shared(a: Mapping[str, Document], b: Mapping[str, Document]) -> tuple[NotShared, ...]:
    """Return the executables that only one of two artifacts has.

    Each is paired with the most similar executable of the other artifact. Pairs with equal changes form one group. `a`
    and `b` map the keys of executables to JSON documents. A key is the digest of its document.
    """
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
    """Return how different two executables are, as a sort key of two numbers.

    The first number is 1 if the backends differ, or if only one executable has a body. Otherwise it is 0. The second is
    the number of lines in which the bodies differ.
    """
    lines, others = set(a["body"] or ()), set(b["body"] or ())
    return int(a["backend"] != b["backend"] or (a["body"] is None) != (b["body"] is None)), len(lines ^ others)


def _exe_changes(a: Document, b: Document) -> list[Change]:
    """Return the changes between two executables. `a` and `b` are the JSON documents that identify them.

    If their bodies differ, only the first differing line is reported.
    """
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
    """Return text that names the first file in which two artifacts differ. The text also names the field, line or byte.

    If all files are equal, return the first differing field of manifest.json. Return "" for equal artifacts.
    """
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
    """Return text for the first difference between two JSON values: its path and both values. Return "" if they are
    equal.

    `path` is the path of the values `a` and `b`.
    """
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
