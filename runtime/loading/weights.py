"""The places of weights in an artifact's weight files, and weights as views of those files, mapped into memory."""

import itertools
import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter, ValidationError

from ingot.ir.artifact.manifest import WeightEntry
from ingot.ir.errors import ArtifactError
from ingot.ir.mesh import ONE_DEVICE, Rank, ranks
from ingot.ir.types import DTYPES
from ingot.runtime.loading.artifact import Artifact, malformed

(ONLY_RANK,) = ranks(ONE_DEVICE)
_INDEX = TypeAdapter(dict[str, WeightEntry])


@dataclass(frozen=True)
class Place:
    """Where a weight is stored in the artifact: row-major, from byte `offset` of `file` on. It is within the file and
    aligned for its dtype."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def weight_places(artifact: Artifact, rank: Rank = ONLY_RANK) -> dict[str, Place]:
    """Return where each weight is stored in the artifact, by name. Tied weights share one tensor, and so have equal
    places. If a weight is sharded over devices, the place is that of `rank`'s shard.

    Raises ArtifactError if weights.json names a place that is not in a weight file, or if places overlap.
    """
    try:
        index = _INDEX.validate_json(artifact.read_text("weights.json"))
    except ValidationError as error:
        raise malformed("weights.json", error) from None
    sizes = {entry.path: entry.size for entry in artifact.manifest.files}
    files = {path: sizes[path] for path in artifact.weight_files()}
    places = {name: _place(name, entry, files, rank) for name, entry in index.items() if entry.same_as is None}
    for name, entry in index.items():
        if entry.same_as is not None:
            # `same_as` must name an original: neither the weight itself nor a weight with its own `same_as`.
            if index.get(entry.same_as, entry).same_as is not None:
                raise _weight_error(name, f"same_as is {entry.same_as!r:.200}", "a weight with a place in a file")
            places[name] = places[entry.same_as]
    _check_apart(places)
    return places


def map_weights(
    artifact: Artifact,
    rank: Rank = ONLY_RANK,
    *,
    names: Collection[str] | None = None,
    verify: bool = False,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return every weight by name, as a view of its memory-mapped file, without a copy. Only the files of `rank` (this
    device, if there are several) are opened. If a weight is sharded, the view is the shard of `rank`.

    names     the weights that the rank needs, on a mesh; None: all
    verify    compare the digests of these files with the manifest
    threads   number of threads that compute digests; default: one per core, at most 8

    Raises ArtifactError for a wrong weights.json and for damaged files.
    """
    places = weight_places(artifact, rank)
    if names is not None:
        places = {name: place for name, place in places.items() if name in names}
    if verify:
        artifact.verify_files(files_of(artifact, places, rank), threads)
    maps = {file: map_file(artifact, file) for file in dict.fromkeys(place.file for place in places.values())}
    tensors = {place: _view(place, maps[place.file]) for place in places.values()}
    return {name: tensors[place] for name, place in places.items()}


def files_of(artifact: Artifact, places: Mapping[str, Place], rank: Rank) -> tuple[str, ...]:
    """Return the paths of the weight files that `rank` must load (a rank is one of several devices). On a single
    device, these are all weight files. `places` maps a weight's name to its place."""
    return tuple(dict.fromkeys(place.file for place in places.values())) if rank.axes else artifact.weight_files()


def map_file(artifact: Artifact, relpath: str) -> mmap.mmap:
    """Map a weight file into memory. `relpath` is its path within the artifact. Raises ArtifactError if it cannot be
    mapped."""
    try:
        with artifact.file(relpath).open("rb") as file:
            # Copy-on-write: a stray write never reaches the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ArtifactError(f"a weight file cannot be mapped: {error}", where=str(artifact.folder / relpath)) from error


def _place(name: str, entry: WeightEntry, files: Mapping[str, int], rank: Rank) -> Place:
    """Return where a weight is stored. If it is sharded over devices, this is the place of `rank`'s shard.

    name    the weight's name
    entry   its entry in weights.json
    files   path -> size of each weight file

    Raises ArtifactError for an invalid entry.
    """
    file, offset = _part(name, entry, rank)
    if entry.dtype not in DTYPES:
        raise _weight_error(name, f"the dtype is {entry.dtype!r:.80}", ", ".join(DTYPES))
    if file not in files:
        raise _weight_error(name, f"the file {file!r:.200} is none", "a weight file of the manifest")
    place = Place(file, offset, DTYPES[entry.dtype], entry.shape)
    if place.end > files[file] or offset % place.dtype.itemsize:
        raise _weight_error(
            name,
            f"it is at bytes [{offset}, {place.end})",
            f"a place within {files[file]} bytes, at a multiple of {place.dtype.itemsize}",
        )
    return place


def _check_apart(places: Mapping[str, Place]) -> None:
    """Raise ArtifactError if two different weights share bytes of a file. `places` maps a weight's name to its
    place."""
    named = {place: name for name, place in places.items() if place.nbytes}
    ordered = sorted(named, key=lambda place: (place.file, place.offset))
    for before, place in itertools.pairwise(ordered):
        if before.file == place.file and before.end > place.offset:
            raise _weight_error(
                named[place],
                f"it begins at byte {place.offset}, and '{named[before]:.200}' ends at {before.end}",
                "weights that share no bytes, or are the same",
            )


def _part(name: str, entry: WeightEntry, rank: Rank) -> tuple[str, int]:
    """Return (file, byte offset) of a weight, from its entry in weights.json. If it is sharded over devices, this is
    the place of `rank`'s shard."""
    if entry.file is not None:
        return entry.file, entry.offset
    parts = entry.parts or ()
    index, count = rank.part
    if len(parts) != count:
        raise _weight_error(name, f"it has parts of {len(parts)} ranks", f"parts of {count}")
    return parts[index].file, parts[index].offset


def _view(place: Place, buffer: mmap.mmap) -> torch.Tensor:
    count = math.prod(place.shape)
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(buffer, dtype=place.dtype, count=count, offset=place.offset).reshape(place.shape)


def _weight_error(name: str, what: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"weights.json is malformed: {what}",
        where=f"weights.json, {name[:200]}",
        expected=expected,
        hint="compile the model again",
    )
