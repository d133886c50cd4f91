"""The method "fp8": weights in f8e4m3, with one scale for a weight, or one for each block of 128 x 128.

DeepSeek-V3 and Qwen 3 store blocks, and call the scale `weight_scale_inv`: a weight is its elements times that. Others
store `weight_scale`, and `input_scale` if activations have a fixed scale (transformers, `FineGrainedFP8Config`, and
vLLM's `fp8.py`). Step3 stores the matrices of all experts of a layer as one tensor, and their scales as another (vLLM,
`step3_text.py`).

Without a fixed scale, this reader rounds activations token by token, or in the groups of 128 that blocks of weights
have. One scale for all tokens would make results depend on the other tokens of a step.
"""

from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, input_scale, scales_of, weight
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import cast, dequantize, reshape, source, stack, take_slice
from ingot.ir.stored.recipes import check_scales

E4M3 = torch.float8_e4m3fn


def read_fp8(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    # With powers of two, the same bits are stored as f8e8m0 or as float32; activations take exact scales either way.
    fields.choice("scale_fmt", ("ue8m0", "float"), "float")
    ignored = matcher(fields.names("modules_to_not_convert", "ignored_layers"))
    block = fields.get("weight_block_size", list, [])
    fields.skip("quant_method", "dequantize", "is_checkpoint_fp8_serialized")
    if block and (len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block)):
        raise fields.error("weight_block_size", f"is {block!r:.80}", "two sizes, such as [128, 128]")
    if block and static:
        raise fields.error("activation_scheme", "is 'static' with blocks of weights", "'dynamic'")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("weight"):
            name = f"{module}.weight"
            if stored.tensors[name].dtype is E4M3:
                if ignored(module):
                    raise stored.error(f"{name} is quantized, but the quantization_config excludes it", "floats")
                weights[name] = _weight(stored, module, (block[0], block[1]) if block else None, static=static)
        return Logical.of(stored, weights)

    return read


def _weight(stored: Stored, module: str, block: tuple[int, int] | None, *, static: bool) -> Weight:
    name = f"{module}.weight"
    shape = stored.tensors[name].shape
    if len(shape) == 3 and block:
        return _stack(stored, module, (shape[0], shape[1], shape[2]), block)
    if len(shape) != 2:
        raise stored.error(f"{name} is {list(shape)}", "a matrix, or a stack of matrices with blocks of scales")
    if block:
        scale = f"{module}.weight_scale_inv"
        level, rule = _of_blocks(block)
    else:
        scale = next((one for one in ("weight_scale", "weight_scale_inv") if f"{module}.{one}" in stored.tensors), "")
        scale = f"{module}.{scale or 'weight_scale'}"
        per_row = scale in stored.tensors and stored.tensors[scale].shape[:1] == shape[:1] != (1,)
        level = Scales(1 if per_row else 0, 0)
        rule = Activations("f8e4m3", dynamic=not static, stored=static)
    made, _ = scales_of(stored, scale, level.grid((shape[0], shape[1])), wide=True)
    format = format_of("f8e4m3", (level,), rule)
    parts = {"weight": source(name), "scales": made}
    uses = [f"{module}.{one}" for one in ("input_scale", "activation_scale") if f"{module}.{one}" in stored.tensors]
    if static:
        parts["input_scale"] = input_scale(stored, uses[0] if uses else f"{module}.input_scale")
    elif uses:
        raise stored.error(f"{uses[0]} is stored, but activations are 'dynamic'", "activation_scheme 'static'")
    return weight(shape, format, parts, *uses)


def _of_blocks(block: tuple[int, int]) -> tuple[Scales, Activations]:
    """Return the scales of a matrix with blocks of this size, and how activations are rounded."""
    return Scales(*block), Activations("f8e4m3", block[1])


def _stack(stored: Stored, module: str, shape: tuple[int, int, int], block: tuple[int, int]) -> Weight:
    """Return the weight of a stack of matrices [E, N, K], each with its own grid of scales."""
    name, scale = f"{module}.weight", f"{module}.weight_scale_inv"
    level, rule = _of_blocks(block)
    matrix = shape[1], shape[2]
    grid = level.grid(matrix)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    wide = stored.info(scale, dtypes, [(shape[0], *grid)]).dtype is torch.float32
    format = format_of("f8e4m3", (level,), rule)
    matrices = []
    for index in range(shape[0]):
        codes, scales = (take_slice(source(one), 0, index, index + 1) for one in (name, scale))
        checked = check_scales(reshape(scales, grid))
        parts = {"weight": reshape(codes, matrix), "scales": checked if wide else cast(checked, torch.float32)}
        matrices.append(dequantize(parts, format.name))
    made = stack(matrices)
    return Weight(shape, made, made.sources())
