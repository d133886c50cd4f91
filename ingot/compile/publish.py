"""Write an artifact into a hidden folder next to the output; one rename at the end publishes it."""

from dataclasses import dataclass
from pathlib import Path

from ingot.compile.folder_writer import FolderWriter, files_in
from ingot.ir.artifact.digest import digest_files
from ingot.ir.artifact.manifest import CHECKSUMS, OUTSIDE_IDENTITY, UNLISTED, FileEntry, Manifest, checksum_text
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Sealed:
    """An artifact with a written manifest that is not published yet. `folder` is its temporary folder."""

    folder: Path
    manifest: Manifest
    build_id: str


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
        self._sealed: Sealed | None = None

    def path(self, relpath: str) -> Path:
        """Return the path at which to write the artifact's file `relpath`. Make its folders.

        Raises OSError or InternalError.
        """
        if relpath in (MANIFEST, CHECKSUMS):
            raise InternalError(f"{relpath} is written by publish alone")
        return super().path(relpath)

    def clear(self) -> None:
        self._sealed = None
        super().clear()

    def seal(self, manifest: Manifest, threads: int | None = None) -> Sealed:
        """Write the manifest, with the digests of all files. Afterwards, only files that it does not list may be added.

        `manifest.files` must be empty, and is filled in the written manifest. `threads` is the number of threads that
        compute digests. None lets `seal` choose.
        """
        folder = self.folder()
        if self._sealed is not None:
            raise InternalError("the artifact is sealed already")
        if manifest.files:
            raise InternalError("the manifest of a new artifact lists files already")
        listed = self._listed()
        paths = [folder / relpath for relpath in listed]
        entries = tuple(
            FileEntry(path=relpath, size=path.stat().st_size, chunks=chunks)
            for relpath, path, chunks in zip(listed, paths, digest_files(paths, threads), strict=True)
        )
        complete = Manifest.model_validate({**dict(manifest), "files": entries})
        text = complete.dump().encode()
        (folder / MANIFEST).write_bytes(text)
        self._sealed = Sealed(folder, complete, checksum_text(text, {})[1])
        return self._sealed

    def publish(self, manifest: Manifest | None = None, threads: int | None = None) -> str:
        """Make the artifact visible at `output`, and return its `build_id`.

        If `manifest` is passed, `seal` is called with it first. This writes the checksums, syncs all files to disk, and
        renames the temporary folder. Raises OutputError if `output` exists by now.
        """
        sealed = self._sealed if manifest is None else self.seal(manifest, threads)
        folder = self.folder()
        if sealed is None:
            raise InternalError("the artifact has no manifest", hint="pass one, or call `seal` first")
        if late := set(self._listed()) ^ {entry.path for entry in sealed.manifest.files}:
            raise InternalError(f"{min(late)} was added or removed after the manifest was written")
        outside = {name: (folder / name).read_bytes() for name in OUTSIDE_IDENTITY if (folder / name).exists()}
        checksums, build_id = checksum_text((folder / MANIFEST).read_bytes(), outside)
        (folder / CHECKSUMS).write_text(checksums)
        self.publish_folder()
        return build_id

    def _listed(self) -> list[str]:
        """Return the sorted relative paths of the written files that the manifest must list."""
        return [relpath for relpath in files_in(self.folder()) if relpath not in UNLISTED]
