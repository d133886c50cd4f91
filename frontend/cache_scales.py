"""Read the scales of eight-bit KV caches from checkpoints that have them, and choose which scales a cache has.

A checkpoint has one scale for keys and one for values per layer, or one of each per head, as with the strategy
"attn_head" of compressed-tensors. Caches can use the first kind.
"""

import math
import re
from collections.abc import Iterable, Mapping

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.quantized.readers import FIELDS
from ingot.ir import ops
from ingot.ir.cache.dtype import CACHE_DTYPES, CacheScales
from ingot.ir.errors import CheckpointError, OptionError
from ingot.ir.program import Model

# The values of the option kv_cache_scales.
CACHE_SCALES = ("auto", "tensor", "head", "token")

# As llm-compressor writes them (self_attn.k_scale), ModelOpt (self_attn.k_proj.k_scale), and vLLM's own names
# (self_attn.attn.k_scale): `maybe_remap_kv_scale_name` in vLLM's model_loader/weight_utils.py.
SCALE_NAMES = r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.(?=k)|v_proj\.(?=v))?([kv])_scale"


def read_cache_scales(checkpoint: Checkpoint) -> dict[int, CacheScales]:
    """Return the scales of keys and values in eight-bit KV caches, as the checkpoint stores them, by layer number.

    The result is empty if the checkpoint has none, or one for each head. Raises CheckpointError if a scale is not a
    positive number, or if a layer lacks one of the two scales or has one twice.
    """
    found: dict[int, dict[str, float]] = {}
    stored = _stored(checkpoint)
    if _by_head(checkpoint, stored):
        return {}
    for name, match in stored.items():
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


def _stored(checkpoint: Checkpoint) -> dict[str, re.Match[str]]:
    """Return the names of the checkpoint's scales of KV caches, with their matches of SCALE_NAMES."""
    names = (name for name in sorted(checkpoint.tensors) if ":" not in name)
    return {name: match for name in names if (match := re.fullmatch(SCALE_NAMES, name)) is not None}


def _by_head(checkpoint: Checkpoint, names: Iterable[str]) -> bool:
    """Return whether the scales `names` are [heads, 1, 1], one for each head, as with the strategy "attn_head".

    Other shapes than one number are refused when a scale is read.
    """
    shapes = {tuple(checkpoint.tensors[name].shape) for name in names}
    return bool(shapes) and all(len(shape) == 3 and shape[0] > 1 and shape[1:] == (1, 1) for shape in shapes)


def made_for(checkpoint: Checkpoint) -> str | None:
    """Return the kv_cache_dtype, "fp8" or "int8", for which the checkpoint has scales. None if it has none.

    compressed-tensors names the type in `kv_cache_scheme`, and ModelOpt in `kv_cache_quant_algo`. Scales that nothing
    describes are for fp8, as in vLLM.
    """
    if not _stored(checkpoint):
        return None
    described = next((one for name in FIELDS if isinstance(one := checkpoint.config.get(name), dict)), {})
    nested = described.get("quantization")
    for part in (described, nested if isinstance(nested, dict) else {}):
        scheme, algorithm = part.get("kv_cache_scheme"), part.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            return "int8" if scheme.get("type", "int") == "int" else "fp8"
        if algorithm == "INT8":
            return "int8"
    return "fp8"


def scaled_per_token(checkpoint: Checkpoint, dtype: str, scales: str) -> bool:
    """Return whether a KV cache has scales per token, by the options kv_cache_dtype and kv_cache_scales.

    With "auto", it has the checkpoint's scales if they are for this dtype and not per head. If the checkpoint has none,
    fp8 has scales of 1.0, and int8, which would then hold whole numbers, has scales per token. Raises OptionError for
    options that do not fit each other or the checkpoint.
    """
    if scales not in CACHE_SCALES:
        raise OptionError(f"unknown kv_cache_scales '{scales:.80}'", expected=", ".join(CACHE_SCALES))
    if CACHE_DTYPES[dtype] is None:
        if scales != "auto":
            raise OptionError(
                f"kv_cache_scales '{scales}' with kv_cache_dtype '{dtype}', which has no scales",
                expected="kv_cache_dtype fp8 or int8",
            )
        return False
    if scales == "head":
        raise OptionError(
            "kv_cache_scales 'head': no op reads a scale for each head",
            expected="token, which needs no scales of the checkpoint, or tensor",
        )
    if scales == "token":
        return True
    made, by_head = made_for(checkpoint), _by_head(checkpoint, _stored(checkpoint))
    if scales == "auto":
        return by_head or (made or "fp8") != dtype
    if by_head:
        problem = "the checkpoint has a scale of its KV cache for each head"
    elif made is None and dtype == "int8":
        problem = "the checkpoint has no scales for its KV cache, and int8 without scales holds whole numbers"
    elif made is not None and made != dtype:
        problem = f"the checkpoint's scales of its KV cache are for {made}, and kv_cache_dtype is '{dtype}'"
    else:
        return False
    raise OptionError(
        f"kv_cache_scales 'tensor': {problem}", where=str(checkpoint.folder), expected="kv_cache_scales token"
    )


def unused_scales(checkpoint: Checkpoint, dtype: str, *, per_token: bool) -> str | None:
    """Return a sentence for the user if a cache of eight bits does not use the checkpoint's scales; None otherwise."""
    if CACHE_DTYPES[dtype] is None or not per_token or (made := made_for(checkpoint)) is None:
        return None
    return f"scales of the KV cache for {made}: the cache in {dtype} has scales per token instead"


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
    """Write the scales of eight-bit KV caches into the calls of attention of a traced model.

    `scales` maps layer numbers to the scales of keys and values.
    """
    for program in model.entries.values():
        for node in (*program.calls(ops.attention.overload), *program.calls(ops.latent_attention.overload)):
            layer = node.kwargs["layer"]
            if isinstance(layer, int) and layer in scales:
                node.kwargs = {**node.kwargs, **scales[layer].options()}
