"""Make the weights of an artifact: execute the recipe of each param, and write each distinct tensor once."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from ingot.compile.folder_writer import FolderWriter, WritableFiles
from ingot.compile.pieces import Pieces, pieces_of
from ingot.compile.tensor_file import write_tensors
from ingot.ir.errors import CheckpointError
from ingot.ir.mesh import ONE_DEVICE, Mesh, ranks
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import Recipe, Results
from ingot.ir.types import DTYPE_NAMES

# Computed tensors of a file stay in memory until it is written. Those of the checkpoint do not: they are pages of its
# files. Loading reads files in parallel.
SHARD_BYTES = 1 << 30
# Files that are written while the next one's tensors are made: one thread copies about as fast as it makes tensors.
WRITERS = 3


@dataclass(frozen=True)
class Packed:
    """The result of `pack_weights`: the bytes and the number of all written tensors, and the number of params.

    Several params can share one tensor.
    """

    bytes: int
    tensors: int
    params: int


@dataclass(frozen=True)
class Wanted:
    """The weights of one artifact, or of one variant of a fat artifact.

    - `params`: by name
    - `files`: where its weights.json is written
    - `folders`: a further folder for some params, such as "stage1" for those of one pipeline stage
    """

    params: Mapping[str, ParamSpec]
    files: WritableFiles
    folders: Mapping[str, str] = field(default_factory=dict)


def pack_weights(
    wanted: Mapping[str, Wanted],
    read: Callable[[str], torch.Tensor],
    writer: FolderWriter,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    mesh: Mesh = ONE_DEVICE,
    *,
    file_bytes: int = SHARD_BYTES,
    writers: int = WRITERS,
) -> Packed:
    """Make the tensor of each param, and write it to a file weights/NNNNN.safetensors.

    The recipe of a param says how it is made of checkpoint tensors. `read` takes a name and returns the checkpoint
    tensor. `on_done` is called with the number of finished params and the total. weights.json records where each param
    is. Params with equal recipe, placement (distribution over a mesh) and type share a tensor.

    `wanted` maps the name of a variant to its weights; an artifact of one target is the variant "". Variants share
    tensors too. A tensor that only some of them read is in a folder of their names, such as weights/cpu+sm_90, so that
    each variant reads whole files.

    Tensors that are sharded over `mesh` are written once per rank, to weights/rankR/NNNNN.safetensors. A rank then
    reads only its bytes. A tensor that params of several `folders` share is in none. A file has about `file_bytes`, and
    up to `writers` files are in memory while they are written.

    A recipe step with several results (a quantized weight, its scales and zeros) runs once. Its results are kept until
    the last param that needs one is written. Raises CheckpointError if the result of a recipe does not have the type of
    its param.
    """
    specs: dict[_Key, tuple[str, ParamSpec]] = {}
    readers: dict[_Key, dict[str, str]] = {}  # by variant: the first param that reads the tensor
    inner: dict[_Key, set[str]] = {}
    for variant, one in wanted.items():
        for name, spec in one.params.items():
            key = _key(spec)
            specs.setdefault(key, (name, spec))
            readers.setdefault(key, {}).setdefault(variant, name)
            inner.setdefault(key, set()).add(one.folders.get(name, ""))
    memo: dict[Recipe, Results] = {}
    waiting = Counter(step for _, spec in specs.values() for step in spec.recipe.shared_steps())
    places: dict[_Key, dict[str, Any]] = {}
    total = 0
    with _Saving(writer, writers) as saving:
        made: dict[str, _Files] = {}

        def files_in(*path: str) -> _Files:
            folder = "/".join(("weights", *filter(None, path)))
            return made.setdefault(folder, _Files(saving, folder, file_bytes))

        for done, (key, (name, spec)) in enumerate(specs.items(), 1):
            waiting.subtract(spec.recipe.shared_steps())
            some = "" if len(readers[key]) == len(wanted) else "+".join(readers[key])
            path = some, next(iter(inner[key])) if len(inner[key]) == 1 else ""
            place = places.setdefault(key, {})
            if mesh and any(one.kind == "shard" for one in spec.placement):
                place["parts"] = [{} for _ in ranks(mesh)]
                for rank, part in zip(ranks(mesh), place["parts"], strict=True):
                    tensor = _made(name, spec, pieces_of(spec.recipe.for_rank(rank), read, memo))
                    total += files_in(*path, f"rank{rank.index}").add(name, tensor, part)
            else:
                total += files_in(*path).add(name, _made(name, spec, pieces_of(spec.recipe, read, memo)), place)
            memo = {step: results for step, results in memo.items() if waiting[step] > 0}
            on_done(done, len(specs))
        for files in made.values():
            files.flush()
    for variant, one in wanted.items():
        one.files.write_json("weights.json", _index(variant, one.params, readers, places))
    return Packed(total, len(specs), sum(len(one.params) for one in wanted.values()))


# What makes a tensor: the recipe, the placement and the type of a param.
_Key = tuple[Recipe, object, object]


def _key(spec: ParamSpec) -> _Key:
    return spec.recipe, spec.placement, spec.type


def _index(
    variant: str,
    params: Mapping[str, ParamSpec],
    readers: Mapping[_Key, Mapping[str, str]],
    places: Mapping[_Key, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the value of a variant's weights.json. The first param that reads a tensor has the tensor's place."""
    index: dict[str, dict[str, Any]] = {}
    for name, spec in params.items():
        key = _key(spec)
        owner = readers[key][variant]
        index[name] = {
            "recipe": str(spec.recipe),
            "dtype": DTYPE_NAMES[spec.type.dtype],
            "shape": list(spec.type.shape),
            "shard": [str(place) for place in spec.placement],
            **(places[key] if owner == name else {"same_as": owner}),
        }
    return index


def _made(name: str, spec: ParamSpec, pieces: Pieces) -> Pieces:
    """Return the pieces of the param `name`, which its recipe (the steps that make it) returned.

    Raises CheckpointError if they are not of the param's type. The file has them in row-major layout.
    """
    if problem := spec.type.mismatch(pieces.meta()):
        raise CheckpointError(f"the weight '{name}' has {problem}", where=str(spec.recipe))
    return pieces


class _Saving(AbstractContextManager["_Saving"]):
    """A context manager that writes safetensors files in the background, up to `writers` at a time.

    The end of the block waits for all files.
    """

    def __init__(self, writer: FolderWriter, writers: int) -> None:
        self._writer, self._most = writer, writers
        self._threads = ThreadPoolExecutor(writers, "weights")
        self._begun: deque[Future[None]] = deque()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=error is not None)
        while error is None and self._begun:
            self._begun.popleft().result()

    def save(self, file: str, tensors: Mapping[str, Pieces], places: Mapping[str, dict[str, Any]]) -> None:
        """Start to write `tensors` to `file` in the background.

        `places` has a dict for each tensor. When the file is written, the dict receives the keys "file" and "offset".
        Raises the errors of files that were started earlier.
        """
        while len(self._begun) >= self._most:
            self._begun.popleft().result()
        self._begun.append(self._threads.submit(self._save, file, tensors, places))

    def _save(self, file: str, tensors: Mapping[str, Pieces], places: Mapping[str, dict[str, Any]]) -> None:
        offsets = write_tensors(self._writer.path(file), tensors)
        self._writer.sync_soon(file)
        for name, offset in offsets.items():
            places[name].update(file=file, offset=offset)


@dataclass
class _Files:
    """Collects the tensors of one folder into files of about `file_bytes`. `written` counts the files.

    `places` has a dict for each tensor that is not in a file yet. The dict later receives the tensor's file and offset.
    """

    saving: _Saving
    folder: str
    file_bytes: int
    tensors: dict[str, Pieces] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: int = 0

    def add(self, name: str, tensor: Pieces, place: dict[str, Any]) -> int:
        """Add a tensor, and return its size in bytes.

        `place` receives "file" and "offset" when the tensor's file is written.
        """
        self.tensors[name], self.places[name] = tensor, place
        if sum(item.nbytes for item in self.tensors.values()) >= self.file_bytes:
            self.flush()
        return tensor.nbytes

    def flush(self) -> None:
        if not self.tensors:
            return
        self.saving.save(f"{self.folder}/{self.written:05d}.safetensors", self.tensors, self.places)
        self.tensors, self.places = {}, {}
        self.written += 1
