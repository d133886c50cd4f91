"""Executing weight recipes into the artifact's safetensors files, each distinct tensor once."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from ingot.frontend.safetensors_header import read_header
from ingot.ir.errors import CheckpointError
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
) -> Packed:
    """Write weights/NNNNN.safetensors and weights.json. Params with equal recipe, placement and type share a tensor.

    A step of several results (a quantized weight, its scales and zeros) is executed once, and its results are kept
    until the last param that needs one is written.

    Raises CheckpointError when a recipe's result does not fit its param.
    """
    owner: dict[tuple[Recipe, object, object], str] = {}
    index: dict[str, dict[str, object]] = {}
    shard: dict[str, torch.Tensor] = {}
    memo: dict[Recipe, Results] = {}
    waiting = Counter(step for spec in params.values() for step in spec.recipe.shared_steps())
    total = done = files = 0

    def flush() -> None:
        nonlocal files
        if not shard:
            return
        file = f"weights/{files:05d}.safetensors"
        path = writer.path(file)
        save_file(shard, path)
        for name, info in read_header(path).items():
            index[name].update(file=file, offset=info.begin)
        shard.clear()
        files += 1

    for name, spec in params.items():
        key = (spec.recipe, spec.placement, spec.type)
        entry: dict[str, object] = {
            "recipe": str(spec.recipe),
            "dtype": DTYPE_NAMES[spec.type.dtype],
            "shape": list(spec.type.shape),
            "shard": [str(place) for place in spec.placement],
        }
        done += 1
        waiting.subtract(spec.recipe.shared_steps())
        if key in owner:
            index[name] = {**entry, "same_as": owner[key]}
            continue
        owner[key] = name
        tensor = spec.recipe.execute(read, memo).contiguous()
        memo = {step: results for step, results in memo.items() if waiting[step] > 0}
        if problem := spec.type.mismatch(tensor):
            raise CheckpointError(f"the weight '{name}' has {problem}", where=str(spec.recipe))
        index[name] = entry
        # A copy where two recipes gave views of one checkpoint tensor, which the format cannot express.
        shard[name] = (
            tensor.clone() if any(tensor.data_ptr() == other.data_ptr() for other in shard.values()) else tensor
        )
        total += tensor.numel() * tensor.element_size()
        if sum(item.numel() * item.element_size() for item in shard.values()) >= SHARD_BYTES:
            flush()
        on_done(done, len(params))
    flush()
    writer.write_json("weights.json", index)
    return Packed(total, len(owner), len(params))
