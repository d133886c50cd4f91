"""The artifact's schema: the contents of `manifest.json`, and the rules for the names of the other files.

The compiler (`ingot.compile.publish`) writes this schema, and the loader (`ingot.runtime.loading.artifact`) rejects any
other. An artifact is a folder:

    manifest.json     the Manifest below, in canonical JSON; its SHA-256 is the artifact's `build_id`
    manifest.sha256   checksums of manifest.json and of the next two, in the format of `sha256sum -c`
    golden/run.json   results at compile time (`ingot.ir.artifact.golden`), in the bits of that machine
    timings.json      the duration of the compile, and its source folder or commit on the hub
    request.json      "options" of the compile, with which the same request can be read again; "identity", the document
                      whose canonical text has the `request_key` as its SHA-256
    executables.json  by `exe_key`: the document whose canonical text has that key as its SHA-256
                      (`ingot.ir.artifact.documents`: values that documents have in common are written once)
    tuning.json       the tile sizes of kernels, if any (`ingot.ir.artifact.tuning`); another compile can use them
    everything else   listed in `Manifest.files`

The golden run and the timings are not in the manifest, because no identity includes them.
"""

import hashlib
import itertools
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.digest import CHUNK_BYTES, chunk_count
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.json_text import dump_json

SCHEMA_VERSION = 18
CHECKSUMS = "manifest.sha256"
GOLDEN = "golden/run.json"
TIMINGS = "timings.json"
REQUEST = "request.json"
EXECUTABLES = "executables.json"
TUNING = "tuning.json"
NUMERICS = "trace/numerics.json"
WEIGHTS_FOLDER = "weights/"
EXE_FOLDER = "exe/"
# Files outside every identity. Those that exist have a checksum.
OUTSIDE_IDENTITY = (GOLDEN, TIMINGS)
UNLISTED = frozenset({MANIFEST, CHECKSUMS, *OUTSIDE_IDENTITY})

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Scalar = str | int | float | bool | None
Names = Annotated[tuple[str, ...], Field(strict=False)]  # a list is accepted as well


def path_problem(path: str) -> str:
    """Return why `path` is no valid name for a file of an artifact; "" if it is valid.

    A valid name is a relative path with forward slashes, in printable ASCII, that stays in the folder.
    """
    if not path.isascii() or not path.isprintable():
        return "it holds characters that are not printable ASCII"
    if "\\" in path:
        return "it holds a backslash"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it is absolute, or has an empty, `.` or `..` part"
    return ""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileEntry(_Record):
    """A file of an artifact, as the manifest lists it.

    path    its path relative to the artifact
    size    its size in bytes
    chunks  the SHA-256, in hex, of each chunk of 64 MiB
    shared  for a variant of a fat artifact: the place of a file that is outside the variant's folder, relative to the
            fat artifact; None: the file is in the variant's own folder
    """

    path: str
    size: Size
    chunks: tuple[Digest, ...]
    shared: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problem := path_problem(self.path):
            raise ValueError(f"the path {self.path!r} is refused: {problem}")
        if self.shared is not None and (problem := path_problem(self.shared)):
            raise ValueError(f"the shared path {self.shared!r} is refused: {problem}")
        if self.path in UNLISTED:
            raise ValueError(f"{self.path} cannot be listed")
        if len(self.chunks) != chunk_count(self.size):
            raise ValueError(
                f"{self.path} has {self.size} bytes, so {chunk_count(self.size)} chunks of {CHUNK_BYTES}, "
                f"but {len(self.chunks)} digests"
            )
        return self


class Manifest(_Record):
    """The contents of an artifact's manifest.json.

    schema_version  the version of this schema
    name            the artifact's name
    request_key     the key of the artifact in the compile cache
    exe_keys        the keys of its executables in the compile cache
    target          the machine that it was compiled for
    tried           whether code for such machines has ever run on one; False: it was compiled only
    versions        the versions of packages that loading needs, by name
    model           facts for users: architecture, dtype, vocab_size, max_seq_len, max_batch, max_tokens
    files           the files, sorted by path
    """

    schema_version: int
    name: Annotated[str, Field(min_length=1)]
    request_key: Annotated[str, Field(min_length=1)]
    exe_keys: Names
    target: dict[str, Scalar | Names]
    versions: dict[str, str]
    model: dict[str, Scalar]
    tried: bool = True
    files: tuple[FileEntry, ...] = ()

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        paths = [entry.path for entry in self.files]
        if any(a >= b for a, b in itertools.pairwise(paths)):
            raise ValueError("the files are not sorted by path, or one is listed twice")
        return self

    def dump(self) -> str:
        """Return the text of manifest.json."""
        return dump_json(self.model_dump(mode="json", exclude_defaults=True))


class WeightPart(_Record):
    """The place of one rank's part of a weight: `offset` bytes from the start of `file`."""

    file: str
    offset: Size


class WeightEntry(_Record):
    """One weight in weights.json: how it was made, and where it is stored.

    recipe   the text of the recipe that made it from the checkpoint
    dtype    its dtype
    shape    its shape on one rank
    shard    how each axis of the mesh divides it, as text
    file     the file that holds it, `offset` bytes from the start; or None
    same_as  the name of another weight with the same bytes; or None
    parts    where the parts of all ranks are, in order; or None

    Exactly one of `file`, `same_as` and `parts` is set.
    """

    recipe: str
    dtype: str
    shape: tuple[Size, ...]
    shard: tuple[str, ...]
    file: str | None = None
    offset: Size = 0
    same_as: str | None = None
    parts: tuple[WeightPart, ...] | None = None

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if sum(place is not None for place in (self.file, self.same_as, self.parts)) != 1:
            raise ValueError("it needs either a file, parts, or another weight that it is the same as")
        return self


def checksum_text(manifest: bytes, outside: Mapping[str, bytes]) -> tuple[str, str]:
    """Return (text of manifest.sha256, `build_id`). `sha256sum -c` can check this text.

    `manifest` is manifest.json as bytes, and `build_id` is its SHA-256. `outside` holds the golden run and the timings
    as bytes, by path. The manifest does not list these two files, and either may be missing.
    """
    build_id = hashlib.sha256(manifest).hexdigest()
    lines = [f"{build_id}  {MANIFEST}\n"]
    lines += [f"{hashlib.sha256(outside[path]).hexdigest()}  {path}\n" for path in OUTSIDE_IDENTITY if path in outside]
    return "".join(lines), build_id
