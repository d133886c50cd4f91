"""The weights of a GGUF file by their names in Hugging Face checkpoints, and how they are made from its tensors.

llama.cpp changes some tensors when it converts a checkpoint, and these recipes undo it: rows of q and k of Llama are in
another order (its rotary embedding pairs neighbours), and norms of Gemma are stored with 1 added.
"""

import torch

from ingot.frontend.gguf.file import GgufFile
from ingot.frontend.gguf.names import hugging_face_name
from ingot.frontend.quantized.stored import Logical, Shape, Stored, Weight, packing_of, weight
from ingot.ir.formats import Scales, format_of
from ingot.ir.recipe import Recipe, affine, cast, permute, reshape, source
from ingot.ir.stored.gguf_blocks import BLOCK_TYPES
from ingot.ir.stored.recipes import check_scales, gguf_blocks, pack

_UNUSED = frozenset({"rope_freqs.weight"})  # read into the configuration


def read_weights(file: GgufFile, stored: Stored, heads: int, kv_heads: int) -> Logical:
    """Return the checkpoint's weights. Raises CheckpointError for a tensor that no weight of the model is made of."""
    architecture = str(file.metadata["general.architecture"])
    weights: dict[str, Weight] = {}
    for name in file.tensors:
        if name in _UNUSED:
            continue
        known = hugging_face_name(name, architecture)
        if known is None:
            raise stored.error(f"the tensor {name} of the GGUF file is not known", "tensors of a dense decoder")
        count = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        if name in file.types:
            weights[known] = _quantized(file, name, count)
        else:
            made, shape = cast(source(name), torch.float32), file.shape(name)
            if count:
                made = _unpermuted(made, shape, count)
            if architecture.startswith("gemma") and "norm" in name:
                made = affine(made, 1.0, -1.0)
            weights[known] = Weight(shape, made, frozenset((name,)))
    used = {name: info for name, info in stored.tensors.items() if name not in _UNUSED}
    return Logical.of(Stored(used, stored.read, stored.where), weights)


def _unpermuted(recipe: Recipe, shape: Shape, heads: int) -> Recipe:
    """Return a recipe that puts the rows of each head in the order of Hugging Face: first halves, then second halves.

    llama.cpp interleaves them (`convert_hf_to_gguf.py`, `LlamaModel.permute`).
    """
    rest = shape[1:]
    pairs = reshape(recipe, (heads, shape[0] // heads // 2, 2, *rest))
    return reshape(permute(pairs, (0, 2, 1, *range(3, 3 + len(rest)))), shape)


def _quantized(file: GgufFile, name: str, heads: int) -> Weight:
    kind, shape = BLOCK_TYPES[file.types[name]], file.shape(name)
    level = Scales(1, kind.group, dtype=kind.scales, offsets=kind.offsets)
    format = format_of(kind.element, (level,), None, packing_of(kind.element))
    made = gguf_blocks(source(name), file.types[name])
    parts = {part: made[part] for part in format.parts}
    if heads:
        grid = level.grid((shape[0], shape[1]))
        parts = {
            part: _unpermuted(recipe, shape if part == "weight" else grid, heads) for part, recipe in parts.items()
        }
    parts["weight"] = pack(parts["weight"], packing_of(kind.element))
    parts["scales"] = check_scales(parts["scales"], zero=True)
    return weight(shape, format, parts)
