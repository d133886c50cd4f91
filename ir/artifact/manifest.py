"""The artifact's schema: the contents of `manifest.json`, and the rules for the names of the other files.

The compiler (`ingot.compile.publish`) writes this schema, and the loader (`ingot.runtime.artifact`) rejects any other.
An artifact is a folder:

    manifest.json     the Manifest below, in canonical JSON; its SHA-256 is the artifact's `build_id`
    manifest.sha256   checksums of manifest.json and of the next two, in the format of `sha256sum -c`
    golden/run.json   results at compile time (`ingot.ir.artifact.golden`), in the bits of that machine
    timings.json      the duration of the compile, and its source folder or commit on the hub
    request.json      "options" of the compile, with which the same request can be read again; "identity", the document
                      whose canonical text has the `request_key` as its SHA-256
    executables.json  by `exe_key`: the document whose canonical text has that key as its SHA-256
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

SCHEMA_VERSION = 13
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
    """Return why `path` may not name a file of an artifact; "" if it may.

    A name is relative, with forward slashes, in printable ASCII, and cannot leave the folder.
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
    """A file of an artifact as the manifest lists it.

    `path` is relative to the artifact, `size` in bytes. `chunks` holds the SHA-256, in hex, of each chunk of 64 MiB.
    """

    path: str
    size: Size
    chunks: tuple[Digest, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problem := path_problem(self.path):
            raise ValueError(f"the path {self.path!r} is refused: {problem}")
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

    `request_key` is the key of the artifact in the compile cache, `exe_keys` are those of its executables. A machine
    can load the artifact if it has this `target` and these `versions` of packages. `model` holds the facts that users
    need (architecture, dtype, vocab_size, max_seq_len, max_batch, max_tokens). `files` is sorted by path.
    """

    schema_version: int
    name: Annotated[str, Field(min_length=1)]
    request_key: Annotated[str, Field(min_length=1)]
    exe_keys: Names
    target: dict[str, Scalar | Names]
    versions: dict[str, str]
    model: dict[str, Scalar]
    files: tuple[FileEntry, ...] = ()

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        paths = [entry.path for entry in self.files]
        if any(a >= b for a, b in itertools.pairwise(paths)):
            raise ValueError("the files are not sorted by path, or one is listed twice")
        return self

    def dump(self) -> str:
        """Return the text of manifest.json."""
        return dump_json(self.model_dump(mode="json"))


class WeightPart(_Record):
    """The location of one rank's part of a weight: `offset` is in bytes from the start of `file`."""

    file: str
    offset: Size


class WeightEntry(_Record):
    """One weight in weights.json: how it was made, and where it is stored.

    `recipe` is the text of the recipe that made the weight from the checkpoint. The weight's bytes are in one of three
    places: `offset` bytes from the start of `file`; in `parts`, one per rank of the mesh in order; or they are those of
    the weight named `same_as`. `shape` is the shape on one rank. `shard` says, as text for each axis of the mesh, how
    the weight is divided.
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
    """Return (text of manifest.sha256, `build_id`). The text can be checked with `sha256sum -c`.

    `manifest` holds the bytes of manifest.json, and `build_id` is their digest. `outside` maps the paths of files that
    the manifest does not list, the golden run and the timings, to their bytes; a file that does not exist is left out.
    """
    build_id = hashlib.sha256(manifest).hexdigest()
    lines = [f"{build_id}  {MANIFEST}\n"]
    lines += [f"{hashlib.sha256(outside[path]).hexdigest()}  {path}\n" for path in OUTSIDE_IDENTITY if path in outside]
    return "".join(lines), build_id
