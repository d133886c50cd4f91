"""Read the scales of eight-bit KV caches from checkpoints that have them: one for keys and one for values per layer."""

import math
import re
from collections.abc import Mapping

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import ops
from ingot.ir.cache.dtype import CacheScales
from ingot.ir.errors import CheckpointError
from ingot.ir.program import Model

# As llm-compressor writes them (self_attn.k_scale), ModelOpt (self_attn.k_proj.k_scale), and vLLM's own names
# (self_attn.attn.k_scale): `maybe_remap_kv_scale_name` in vLLM's model_loader/weight_utils.py.
SCALE_NAMES = r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.(?=k)|v_proj\.(?=v))?([kv])_scale"


def read_cache_scales(checkpoint: Checkpoint) -> dict[int, CacheScales]:
    """Return the scales of keys and values in eight-bit KV caches, as the checkpoint stores them, by layer number.

    The result is empty if the checkpoint has none. Raises CheckpointError if a scale is not a positive number, or if a
    layer lacks one of the two scales or has one twice.
    """
    found: dict[int, dict[str, float]] = {}
    for name in sorted(checkpoint.tensors):
        if ":" in name or (match := re.fullmatch(SCALE_NAMES, name)) is None:
            continue
        layer, part = int(match[1]), match[2]
        if part in found.setdefault(layer, {}):
            raise CheckpointError(f"layer {layer} has two scales for {part}", where=name, expected="one")
        found[layer][part] = _number(checkpoint, name)
    for layer, scales in found.items():
        if len(scales) == 1:
            raise CheckpointError(
                f"layer {layer} has a scale of its cache for {next(iter(scales))} alone",
                where=str(checkpoint.folder),
                expected="k_scale and v_scale",
            )
    return {layer: CacheScales(scales["k"], scales["v"]) for layer, scales in found.items()}


def _number(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.read(name)
    value = float(tensor) if tensor.numel() == 1 else math.nan
    if not (math.isfinite(value) and value > 0):
        found = f"{value}" if tensor.numel() == 1 else f"of shape {list(tensor.shape)}"
        raise CheckpointError(
            f"the scale {name} is {found}", where=str(checkpoint.folder), expected="a positive number"
        )
    return value


def set_cache_scales(model: Model, scales: Mapping[int, CacheScales]) -> None:
    """Write the scales of eight-bit KV caches into the `attention` calls of a traced model.

    `scales` maps layer numbers to the scales of keys and values.
    """
    for program in model.entries.values():
        for node in program.calls(ops.attention.overload):
            layer = node.kwargs["layer"]
            if isinstance(layer, int) and layer in scales:
                node.kwargs = {**node.kwargs, **scales[layer].options()}
