"""Opening an artifact: read the manifest, refuse mismatches field by field, check digests, and only then open code.

Digests detect damage, not attacks: an artifact holds native code, so load artifacts from trusted sources only.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from ingot.ir.artifact.digest import CHUNK_BYTES, digest_many
from ingot.ir.artifact.manifest import (
    CHECKSUMS,
    OUTSIDE_IDENTITY,
    SCHEMA_VERSION,
    TIMINGS,
    UNLISTED,
    WEIGHTS_FOLDER,
    FileEntry,
    Manifest,
    checksum_text,
)
from ingot.ir.artifact.manifest_file import MANIFEST, shared_folder, tokenizer_folder
from ingot.ir.artifact.trace import HOW_TO_GET, PASSES, Trace, read_trace
from ingot.ir.errors import ArtifactError
from ingot.ir.json_text import parse_json
from ingot.ir.listing import LISTED, listed
from ingot.runtime.loading.artifact_files import read_capped, recorded_checkpoint
from ingot.runtime.loading.variants import check_variant, variant_folder

_MAKE = "make one with `compile-model CHECKPOINT -o NAME.ingot`"
_AGAIN = "compile the model again, or copy the artifact again"

# A file of the manifest, and the index of one of its chunks: bytes [index, index + 1) × CHUNK_BYTES of the file.
FileChunk = tuple[FileEntry, int]


@dataclass(frozen=True)
class Artifact:
    """An artifact: the folder that compiling a model writes. `open_artifact` checks it and returns this object.

    folder     the absolute path of the folder
    manifest   the content of manifest.json
    build_id   the SHA-256 of manifest.json, in hex
    """

    folder: Path
    manifest: Manifest
    build_id: str

    def file(self, relpath: str) -> Path:
        """Return the absolute path of a file. `relpath` is its path within the artifact. Raises ArtifactError if the
        manifest does not list it."""
        return self.place(self._entry(relpath))

    def place(self, entry: FileEntry) -> Path:
        """Return the absolute path of a file of the manifest. A variant of a fat artifact shares files with others."""
        return self.folder / entry.path if entry.shared is None else self.shared / entry.shared

    @cached_property
    def shared(self) -> Path:
        """The folder of the files that this artifact shares with others: the fat artifact that it is a variant of, or
        else its own folder."""
        return shared_folder(self.folder)

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer's files. A model without a tokenizer has none there."""
        return tokenizer_folder(self.folder)

    def read_text(self, relpath: str) -> str:
        """Return the text of a file. Raises ArtifactError if the manifest does not list it, or if it cannot be read as
        UTF-8."""
        try:
            return self._read(relpath).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{relpath} is not UTF-8 at byte {error.start}", where=str(self.folder)) from None

    def read_json(self, relpath: str) -> object:
        """Return the value in a JSON file. Raises ArtifactError if the manifest does not list it, or if it is not
        JSON."""
        try:
            return parse_json(self._read(relpath))
        except ValueError as error:
            raise ArtifactError(f"{relpath} is not JSON: {error}", where=str(self.folder), hint=_AGAIN) from None

    def read_timings(self) -> object:
        """Return the content of timings.json, which records how long the phases of the compile took; None if there is
        no such file. Raises ArtifactError if it is not JSON."""
        path = self.folder / TIMINGS
        try:
            return parse_json(path.read_bytes()) if path.exists() else None
        except OSError as error:
            raise _unreadable(self.folder, error) from error
        except ValueError as error:
            raise ArtifactError(f"{TIMINGS} is not JSON: {error}", where=str(self.folder), hint=_AGAIN) from None

    @cached_property
    def has_trace(self) -> bool:
        """Whether the artifact has a trace: a record of every compiler pass."""
        return any(entry.path == PASSES for entry in self.manifest.files)

    @cached_property
    def trace(self) -> Trace:
        """The trace: a record of every compiler pass. Raises ArtifactError if the artifact was compiled without a
        trace."""
        if not self.has_trace:
            raise ArtifactError("the artifact has no trace", where=str(self.folder), hint=HOW_TO_GET)
        return read_trace(self.read_json(PASSES), self.read_timings(), self.read_text)

    def weight_files(self) -> tuple[str, ...]:
        """Return the paths of the weight files within the artifact, in the manifest's order. They are loaded in this
        order."""
        return tuple(entry.path for entry in self.manifest.files if entry.path.startswith(WEIGHTS_FOLDER))

    def verify_files(self, relpaths: Iterable[str] | None = None, threads: int | None = None) -> None:
        """Compute the digests of files and compare them with the manifest. The manifest has one digest for each chunk
        of a file.

        relpaths   the files' paths within the artifact; default: all files of the manifest
        threads    the number of threads that compute digests; default: one per core, at most 8

        Several threads may call this at once. Raises one ArtifactError that lists all damaged chunks.
        """
        chunks = self.chunks(relpaths)
        try:
            found = digest_many([(self.place(entry), index) for entry, index in chunks], threads)
        except OSError as error:
            raise self.unreadable(error) from error
        self.check_digests(dict(zip(chunks, found, strict=True)))

    def chunks(self, relpaths: Iterable[str] | None = None) -> list[FileChunk]:
        """Return the chunks of files, each as (file, index of the chunk in the file). The manifest has a digest for
        each chunk. `relpaths` are the files' paths within the artifact; default: all files of the manifest."""
        entries = self.manifest.files if relpaths is None else tuple(map(self._entry, relpaths))
        return [(entry, index) for entry in entries for index in range(len(entry.chunks))]

    def check_digests(self, found: Mapping[FileChunk, str]) -> None:
        """Compare computed digests with those of the manifest. `found` maps (file, index of a chunk in it) to the
        SHA-256 of the chunk, in hex. Raises one ArtifactError that lists all damaged chunks."""
        damaged = [
            f"{entry.path}, chunk {index} (from byte {index * CHUNK_BYTES} on): "
            f"expected sha256 {entry.chunks[index]}, found {digest}"
            for (entry, index), digest in found.items()
            if digest != entry.chunks[index]
        ]
        if damaged:
            raise ArtifactError(
                f"the artifact is damaged in {len(damaged)} chunks:\n{listed(damaged)}",
                where=str(self.folder),
                expected="the bytes that were written",
                hint=_AGAIN,
            )

    def unreadable(self, error: OSError) -> ArtifactError:
        """Return the ArtifactError for a file of the artifact that cannot be read. `error` comes from the operating
        system."""
        return _unreadable(self.folder, error)

    def _entry(self, relpath: str) -> FileEntry:
        for entry in self.manifest.files:
            if entry.path == relpath:
                return entry
        raise ArtifactError(f"the artifact has no file {relpath!r}", where=str(self.folder), hint=_AGAIN)

    def _read(self, relpath: str) -> bytes:
        path = self.file(relpath)
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(self.folder, error) from error


def open_artifact(
    path: str | Path,
    *,
    variant: str | None = None,
    check: Callable[[Manifest], None] | None = None,
    verify: bool = True,
    threads: int | None = None,
) -> Artifact:
    """Open an artifact folder and check it. A damaged or incomplete artifact, or one of another schema version, is
    refused.

    The checks run in this order: schema version, checksum of the manifest, fields of the manifest, `check`, names and
    sizes of all files, digests.

    variant   the name of a target, such as "sm_90": the variant of a fat artifact to open; None: this machine's
    check     a further check: called with the manifest, raises an error to refuse the artifact. The loader compares the
              artifact's target and versions with this machine
    verify    compare the digests of all files except the weights. The loader checks the weights while it copies them
    threads   number of threads that compute digests; default: one per core, at most 8

    Raises ArtifactError, TargetError if no variant of a fat artifact fits, and the errors of `check`.
    """
    folder = variant_folder(_folder(path), variant)
    try:
        manifest, build_id = _read_manifest(folder)
        if (outer := shared_folder(folder)) != folder:
            check_variant(outer, folder.name, build_id)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if check is not None:
        check(manifest)
    try:
        _check_files(folder, manifest)
    except OSError as error:
        raise _unreadable(folder, error) from error
    artifact = Artifact(folder, manifest, build_id)
    if verify:
        weights = set(artifact.weight_files())
        artifact.verify_files([entry.path for entry in manifest.files if entry.path not in weights], threads)
    return artifact


def malformed(file: str, error: ValidationError) -> ArtifactError:
    """Return the ArtifactError for a JSON file that breaks its schema. `file` is the file's name, and `error` is
    pydantic's. The ArtifactError names the first wrong field."""
    first = error.errors()[0]
    field = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
    return ArtifactError(f"{file} is malformed: {field}: {first['msg']}", where=file, hint="compile the model again")


def _folder(path: str | Path) -> Path:
    try:
        folder = Path(os.path.realpath(path))
        if folder.is_dir():
            return folder
        found = "not a folder" if folder.exists() else "not there"
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, no permission
        raise ArtifactError(f"the path {str(path)[:200]!r} cannot be opened: {error}") from None
    raise ArtifactError(f"{path} is {found}", expected="an artifact folder (NAME.ingot)", hint=_MAKE)


def _unreadable(folder: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"the artifact cannot be read: {error.strerror}", where=str(error.filename or folder))


def _read_manifest(folder: Path) -> tuple[Manifest, str]:
    for name in (MANIFEST, CHECKSUMS, *OUTSIDE_IDENTITY):
        if (folder / name).is_symlink():
            raise ArtifactError(f"{name} is a link", where=str(folder), expected="a file", hint=_AGAIN)
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(
            f"{folder} is no artifact: it has no {MANIFEST}",
            expected="an artifact folder (NAME.ingot)",
            hint=f"this is a checkpoint: {_MAKE}" if (folder / "config.json").is_file() else _MAKE,
        )
    data = read_capped(folder / MANIFEST)
    try:
        value, unread = parse_json(data), None
    except ValueError as error:
        value, unread = None, error
    version = value.get("schema_version") if isinstance(value, dict) else None
    other_schema = type(version) is not int or version != SCHEMA_VERSION  # True equals 1
    if other_schema and type(version) is int:  # first: another schema may have other files and checksums
        raise _schema_error(folder, version)
    if not (folder / CHECKSUMS).is_file():
        raise ArtifactError(f"the artifact has no {CHECKSUMS}", where=str(folder), hint=_AGAIN)
    outside = {name: read_capped(folder / name) for name in OUTSIDE_IDENTITY if (folder / name).is_file()}
    found = read_capped(folder / CHECKSUMS)
    expected, build_id = checksum_text(data, outside)
    if found != expected.encode():
        raise _checksum_error(folder, found, expected)
    if unread is not None:
        raise ArtifactError(f"{MANIFEST} is not JSON: {unread}", where=str(folder), hint=_AGAIN)
    if other_schema:
        raise _schema_error(folder, version)
    try:
        return Manifest.model_validate_json(data), build_id
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'manifest'}: {item['msg']}" for item in error.errors()]
        raise ArtifactError(
            f"{MANIFEST} breaks the schema in {len(problems)} places:\n{listed(problems)}",
            where=str(folder / MANIFEST),
            expected=f"the fields of schema version {SCHEMA_VERSION}",
            hint=_AGAIN,
        ) from None


def _schema_error(folder: Path, version: object) -> ArtifactError:
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    other = "run it with a newer Ingot" if newer else "run it with the Ingot that compiled it"
    return ArtifactError(
        f"the artifact has schema version {version!s:.80}",
        where=str(folder / MANIFEST),
        expected=f"schema version {SCHEMA_VERSION}, the one that this Ingot reads",
        hint=f"compile it again with `compile-model {recorded_checkpoint(folder)} -o NAME.ingot`, or {other}",
    )


def _checksum_error(folder: Path, found: bytes, expected: str) -> ArtifactError:
    lines = found.decode("ascii", "replace").splitlines()
    wanted = expected.splitlines()
    if found[-1:] != b"\n" or not all(re.fullmatch(r"[0-9a-f]{64}  \S+", line) for line in lines):
        return ArtifactError(
            f"{CHECKSUMS} is malformed",
            where=str(folder),
            expected="lines as `sha256sum` writes them",
            hint=_AGAIN,
        )
    if [line[66:] for line in lines] != [line[66:] for line in wanted]:
        return ArtifactError(
            f"{CHECKSUMS} lists {', '.join(line[66:200] for line in lines[:LISTED]) or 'nothing'}",
            where=str(folder),
            expected=f"{', '.join(line[66:] for line in wanted)}, the files that are there",
            hint=_AGAIN,
        )
    name = next((line[66:] for line, other in zip(wanted, lines, strict=True) if line != other), MANIFEST)
    return ArtifactError(
        f"{name} does not match its checksum in {CHECKSUMS}: one of the two is damaged", where=str(folder), hint=_AGAIN
    )


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise ArtifactError if the files in the folder differ from the manifest, without reading them. Each listed file
    must be there with its size. No other files may be there, and no links."""
    found: dict[str, int] = {}
    odd: list[str] = []
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                    continue
                relpath = Path(entry.path).relative_to(folder).as_posix()
                if entry.is_file(follow_symlinks=False):
                    found[relpath] = entry.stat(follow_symlinks=False).st_size
                else:
                    odd.append(relpath)
    wanted = {entry.path: entry.size for entry in manifest.files if entry.shared is None}
    outer = shared_folder(folder)
    for listed_file in manifest.files:
        if listed_file.shared is not None:
            wanted[listed_file.shared] = listed_file.size
            place = outer / listed_file.shared
            if any(one.is_symlink() for one in (place, *place.parents) if one.is_relative_to(outer)):
                odd.append(listed_file.shared)
            elif place.is_file():
                found[listed_file.shared] = place.stat().st_size
    problems = [f"{path}: a link or special file" for path in sorted(odd)]
    problems += [f"{path}: missing" for path in sorted(wanted.keys() - found.keys() - set(odd))]
    problems += [f"{path}: not listed in the manifest" for path in sorted(found.keys() - wanted.keys() - UNLISTED)]
    problems += [
        f"{path}: expected {size} bytes, found {found[path]}"
        for path, size in wanted.items()
        if path in found and found[path] != size
    ]
    if problems:
        raise ArtifactError(
            f"the artifact's files differ from its manifest in {len(problems)} places:\n{listed(problems)}",
            where=str(folder),
            expected="exactly the files of the manifest, with their sizes, and no links",
            hint=_AGAIN,
        )
