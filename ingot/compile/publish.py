"""Write an artifact into a hidden folder next to the output; one rename at the end publishes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.compile.folder_writer import FolderWriter, WritableFiles, files_in
from ingot.ir.artifact.digest import digest_files
from ingot.ir.artifact.manifest import (
    CHECKSUMS,
    EXE_FOLDER,
    OUTSIDE_IDENTITY,
    SCHEMA_VERSION,
    UNLISTED,
    WEIGHTS_FOLDER,
    FileEntry,
    Manifest,
    checksum_text,
)
from ingot.ir.artifact.manifest_file import MANIFEST, VARIANTS, VARIANTS_FOLDER
from ingot.ir.artifact.variants import VARIANT_CHECKSUM, Variant, Variants, variants_checksum
from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Sealed:
    """An artifact with a written manifest that is not published yet. `folder` is its temporary folder."""

    folder: Path
    manifest: Manifest
    build_id: str


@dataclass(frozen=True)
class VariantFiles(WritableFiles):
    """Writes the files of one variant of a fat artifact: the folder `name` of `writer`."""

    writer: "ArtifactWriter"
    name: str

    def path(self, relpath: str) -> Path:
        return self.writer.path(f"{VARIANTS_FOLDER}/{self.name}/{relpath}")


class ArtifactWriter(FolderWriter):
    """A context manager that writes one artifact. Nothing is visible at `output` before `publish` returns.

        with ArtifactWriter(Path("pico.ingot")) as writer:
            writer.write_text("program.ir", text)
            build_id = writer.publish(manifest)

    Raises what FolderWriter raises.
    """

    what = "an artifact"
    example = "NAME.ingot"

    def __init__(self, output: str | Path) -> None:
        super().__init__(output)
        self._sealed: list[Sealed] = []

    def path(self, relpath: str) -> Path:
        """Return the path at which to write the artifact's file `relpath`. Make its folders.

        Raises OSError or InternalError.
        """
        if relpath.rpartition("/")[2] in (MANIFEST, CHECKSUMS, VARIANTS, VARIANT_CHECKSUM):
            raise InternalError(f"{relpath} is written by publish alone")
        return super().path(relpath)

    def clear(self) -> None:
        self._sealed = []
        super().clear()

    def seal(self, manifest: Manifest, threads: int | None = None) -> Sealed:
        """Write the manifest, with the digests of all files. Afterwards, only files that it does not list may be added.

        `manifest.files` must be empty, and is filled in the written manifest. `threads` is the number of threads that
        compute digests. None lets `seal` choose.
        """
        folder = self._unsealed_folder()
        if manifest.files:
            raise InternalError("the manifest of a new artifact lists files already")
        self._sealed = [_sealed(folder, manifest, _entries(folder, self._listed(), threads))]
        return self._sealed[0]

    def seal_variants(self, manifests: Mapping[str, Manifest], request_key: str) -> dict[str, Sealed]:
        """Write the manifest of each variant of a fat artifact, and variants.json.

        `manifests` are by the names of the variants; their `files` are filled in. A variant lists its own files, and
        those outside the variants' folders that it reads: the tokenizer, and the weights that its weights.json names.
        A file of a variant that an earlier variant has too is removed, and the manifest names the earlier one.
        """
        folder = self._unsealed_folder()
        variants = {name: folder / VARIANTS_FOLDER / name for name in manifests}
        outer = [name for name in files_in(folder) if not name.startswith(f"{VARIANTS_FOLDER}/")]
        common = [one.model_copy(update={"shared": one.path}) for one in _entries(folder, outer, None)]
        known: dict[tuple[str, tuple[str, ...]], str] = {}
        sealed: dict[str, Sealed] = {}
        for name, own in variants.items():
            reads = weight_files_of((own / "weights.json").read_bytes()) if (own / "weights.json").is_file() else set()
            entries = [one for one in common if one.path in reads or not one.path.startswith(WEIGHTS_FOLDER)]
            for one in _entries(own, [path for path in files_in(own) if path not in UNLISTED], None):
                place = f"{VARIANTS_FOLDER}/{name}/{one.path}"
                first = known.setdefault((one.path, one.chunks), place)
                if first != place and not one.path.startswith(EXE_FOLDER):  # code is opened as a folder
                    (own / one.path).unlink()
                    one = one.model_copy(update={"shared": first})
                entries.append(one)
            sealed[name] = _sealed(own, manifests[name], sorted(entries, key=lambda entry: entry.path))
        tried = {name: Variant(build_id=one.build_id, tried=one.manifest.tried) for name, one in sealed.items()}
        some = next(iter(manifests.values()))
        whole = Variants(schema_version=SCHEMA_VERSION, name=some.name, request_key=request_key, variants=tried)
        (folder / VARIANTS).write_text(whole.dump())
        self._sealed = list(sealed.values())
        return sealed

    def publish(self, manifest: Manifest | None = None, threads: int | None = None) -> str:
        """Make the artifact visible at `output`, and return its `build_id`.

        If `manifest` is passed, `seal` is called with it first. This writes the checksums, syncs all files to disk, and
        renames the temporary folder. Raises OutputError if `output` exists by now.
        """
        if manifest is not None:
            self.seal(manifest, threads)
        folder = self.folder()
        if not self._sealed:
            raise InternalError("the artifact has no manifest", hint="pass one, or call `seal` first")
        build_id = ""
        wanted: set[str] = set()
        for sealed in self._sealed:
            own = sealed.folder.relative_to(folder)
            wanted |= {one.shared or (own / one.path).as_posix() for one in sealed.manifest.files}
            wanted |= {(own / name).as_posix() for name in UNLISTED if (sealed.folder / name).exists()}
            outside = {
                name: (sealed.folder / name).read_bytes()
                for name in OUTSIDE_IDENTITY
                if (sealed.folder / name).exists()
            }
            checksums, build_id = checksum_text((sealed.folder / MANIFEST).read_bytes(), outside)
            (sealed.folder / CHECKSUMS).write_text(checksums)
            wanted.add((own / CHECKSUMS).as_posix())
        if (folder / VARIANTS).exists():
            checksum, build_id = variants_checksum((folder / VARIANTS).read_bytes())
            (folder / VARIANT_CHECKSUM).write_text(checksum)
            wanted |= {VARIANTS, VARIANT_CHECKSUM}
        if late := set(files_in(folder)) ^ wanted:
            raise InternalError(f"{min(late)} was added or removed after the manifest was written")

        self.publish_folder()
        return build_id

    def _unsealed_folder(self) -> Path:
        if self._sealed:
            raise InternalError("the artifact is sealed already")
        return self.folder()

    def _listed(self) -> list[str]:
        """Return the sorted relative paths of the written files that the manifest must list."""
        return [relpath for relpath in files_in(self.folder()) if relpath not in UNLISTED]


def _entries(folder: Path, relpaths: Sequence[str], threads: int | None) -> list[FileEntry]:
    """Return the manifest's entries of the files `relpaths` in `folder`, with their sizes and digests."""
    paths = [folder / relpath for relpath in relpaths]
    return [
        FileEntry(path=relpath, size=path.stat().st_size, chunks=chunks)
        for relpath, path, chunks in zip(relpaths, paths, digest_files(paths, threads), strict=True)
    ]


def _sealed(folder: Path, manifest: Manifest, entries: Sequence[FileEntry]) -> Sealed:
    """Write the manifest with its files into `folder`."""
    complete = Manifest.model_validate({**dict(manifest), "files": tuple(entries)})
    text = complete.dump().encode()
    (folder / MANIFEST).write_bytes(text)
    return Sealed(folder, complete, checksum_text(text, {})[1])


def weight_files_of(index: bytes) -> set[str]:
    """Return the weight files that a weights.json names."""
    entries: dict[str, Any] = json.loads(index)
    places = [place for entry in entries.values() for place in (entry, *entry.get("parts", ()))]
    return {place["file"] for place in places if "file" in place}
