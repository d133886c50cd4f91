"""Executing weight recipes into the artifact's safetensors files, each distinct tensor once."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file

from ingot.frontend.safetensors_header import read_header
from ingot.ir.errors import CheckpointError
from ingot.ir.mesh import ONE_DEVICE, Mesh, ranks
from ingot.ir.program import ParamSpec
from ingot.ir.recipe import Recipe, Results
from ingot.ir.types import DTYPE_NAMES
from ingot.publish import ArtifactWriter

# A file's tensors are in memory while it is written; loading reads files side by side.
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class Packed:
    """What was packed: resident bytes, and how many tensors serve how many params."""

    bytes: int
    tensors: int
    params: int


def pack_weights(
    params: Mapping[str, ParamSpec],
    read: Callable[[str], torch.Tensor],
    writer: ArtifactWriter,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    mesh: Mesh = ONE_DEVICE,
) -> Packed:
    """Write weights/NNNNN.safetensors and weights.json. Params with equal recipe, placement and type share a tensor.

    What `mesh` splits lies in files of its rank, weights/rankR/NNNNN.safetensors, so that a rank reads its own bytes
    only. A step of several results (a quantized weight, its scales and zeros) is executed once, and its results are
    kept until the last param that needs one is written.

    Raises CheckpointError when a recipe's result does not fit its param.
    """
    owner: dict[tuple[Recipe, object, object], str] = {}
    index: dict[str, dict[str, Any]] = {}
    shared = _Files(writer, "weights")
    own = [_Files(writer, f"weights/rank{rank.index}") for rank in ranks(mesh)] if mesh else []
    memo: dict[Recipe, Results] = {}
    waiting = Counter(step for spec in params.values() for step in spec.recipe.shared_steps())
    total = 0
    for done, (name, spec) in enumerate(params.items(), 1):
        key = (spec.recipe, spec.placement, spec.type)
        index[name] = {
            "recipe": str(spec.recipe),
            "dtype": DTYPE_NAMES[spec.type.dtype],
            "shape": list(spec.type.shape),
            "shard": [str(place) for place in spec.placement],
        }
        waiting.subtract(spec.recipe.shared_steps())
        if key in owner:
            index[name]["same_as"] = owner[key]
            continue
        owner[key] = name
        if mesh and any(place.kind == "shard" for place in spec.placement):
            index[name]["parts"] = [{} for _ in own]
            for files, rank, place in zip(own, ranks(mesh), index[name]["parts"], strict=True):
                total += files.add(name, _made(name, spec, spec.recipe.for_rank(rank).execute(read, memo)), place)
        else:
            total += shared.add(name, _made(name, spec, spec.recipe.execute(read, memo)), index[name])
        memo = {step: results for step, results in memo.items() if waiting[step] > 0}
        on_done(done, len(params))
    for files in (shared, *own):
        files.flush()
    writer.write_json("weights.json", index)
    return Packed(total, len(owner), len(params))


def _made(name: str, spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """What the param's recipe gave, or a rank's part of it, checked and row-major."""
    tensor = tensor.contiguous()
    if problem := spec.type.mismatch(tensor):
        raise CheckpointError(f"the weight '{name}' has {problem}", where=str(spec.recipe))
    return tensor


@dataclass
class _Files:
    """The safetensors files of one folder, written one after the other in order."""

    writer: ArtifactWriter
    folder: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: int = 0

    def add(self, name: str, tensor: torch.Tensor, place: dict[str, Any]) -> int:
        """Take a tensor, whose file and offset `place` will get; its size in bytes."""
        # A copy where two recipes gave views of one checkpoint tensor, which the format cannot express.
        taken = any(tensor.data_ptr() == other.data_ptr() for other in self.tensors.values())
        self.tensors[name], self.places[name] = tensor.clone() if taken else tensor, place
        if sum(item.numel() * item.element_size() for item in self.tensors.values()) >= SHARD_BYTES:
            self.flush()
        return tensor.numel() * tensor.element_size()

    def flush(self) -> None:
        if not self.tensors:
            return
        file = f"{self.folder}/{self.written:05d}.safetensors"
        path = self.writer.path(file)
        save_file(self.tensors, path)
        for name, info in read_header(path).items():
            self.places[name].update(file=file, offset=info.begin)
        self.tensors.clear()
        self.places.clear()
        self.written += 1
