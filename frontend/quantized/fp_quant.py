"""The method "fp_quant": NVFP4 and MXFP4 weights and activations, after a rotation in blocks (arXiv 2509.23202).

A module stores `qweight` u8[N, K / 2], `scales` u8[N, groups], the matrix `forward_hadamard_matrix` [G, G], and
`weight_global_scale` and `act_global_scale`, by which scales were multiplied before they were rounded. Read from
fp_quant 0.3, `module/linear.py` and `module/triton/`; the rounding is that of QuTLASS, `tests/mxfp4_test.py`.
"""

from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.stored import Logical, Stored, Weight, input_scale, packing_of, weight
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import cast, reshape, source
from ingot.ir.stored.recipes import bitcast, check_scales, reciprocal

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# The dtype of scales and the elements that share one.
_KINDS = {"mxfp4": (torch.float8_e8m0fnu, 32), "nvfp4": (torch.float8_e4m3fn, 16)}
_SIZES = (16, 32, 64, 128)
# The scale of MXFP4 activations is 2**floor(log2(largest)) / 3, for elements up to 6 (QuTLASS, "abs_max").
_MX_GLOBAL = 3.0
# Tensors that inference does not use; a module without master weights stores some empty.
_UNUSED = ("backward_hadamard_matrix", "weight", "dqweight")


def read_fp_quant(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    kind = fields.choice("forward_dtype", tuple(_KINDS), "nvfp4")
    # The other method, "quest", derives scales of activations from their standard deviation.
    fields.choice("forward_method", ("abs_max",), "abs_max")
    for name in ("store_master_weights", "pseudoquantization"):
        fields.choice(name, (False,), False)
    size = fields.choice("hadamard_group_size", _SIZES, _KINDS[kind][1])
    fields.choice("transform_init", ("hadamard", "identity", "gsr"), "hadamard")  # the matrix is stored
    kept = fields.names("modules_to_not_convert") or ("lm_head",)
    fields.skip("quant_method", "backward_dtype")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("qweight"):
            if module.endswith(kept):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = _weight(stored, module, kind, size)
        return Logical.of(stored, weights)

    return read


def _weight(stored: Stored, module: str, kind: str, size: int) -> Weight:
    found = stored.info(f"{module}.qweight", (torch.uint8,), [])
    if len(found.shape) != 2:
        raise stored.error(f"{module}.qweight is {list(found.shape)}", "a matrix of two elements in a byte")
    rows, columns = found.shape[0], found.shape[1] * 2
    dtype, group = _KINDS[kind]
    if columns % max(size, group):
        raise stored.error(f"{columns} inputs of {module} are no multiple of {max(size, group)}", "whole blocks")
    stored.info(f"{module}.scales", (torch.uint8,), [(rows, columns // group)])
    for name in ("weight_global_scale", "act_global_scale"):
        stored.check_number(f"{module}.{name}")
    matrix = f"{module}.forward_hadamard_matrix"
    stored.info(matrix, _FLOATS, [(size, size)])
    parts = {
        "weight": source(f"{module}.qweight"),
        # A block of zeros has the scale zero, which f8e8m0 does not have.
        "scales": check_scales(bitcast(source(f"{module}.scales"), dtype), zero=kind == "nvfp4"),
        "outer": reshape(reciprocal(source(f"{module}.weight_global_scale")), (1, 1)),
        "rotation_in": cast(source(stored.same(matrix)), torch.float32),
    }
    if kind == "nvfp4":
        rule = Activations("f4e2m1", group, dtype, stored=True)
        parts["input_scale"] = reciprocal(input_scale(stored, f"{module}.act_global_scale"))
    else:
        if (value := float(stored.read(f"{module}.act_global_scale").flatten()[0])) != _MX_GLOBAL:
            raise stored.error(f"{module}.act_global_scale is {value}", f"{_MX_GLOBAL}, as for abs_max and mxfp4")
        rule = Activations("f4e2m1", group, dtype, factor=4 / _MX_GLOBAL)
    levels = Scales(1, group, dtype=dtype), Scales(0, 0)
    format = format_of("f4e2m1", levels, rule, packing_of("f4e2m1"), rotated_in=size)
    own = [f"{module}.{name}" for name in ("act_global_scale", "forward_hadamard_matrix")]
    for name in (f"{module}.{unused}" for unused in _UNUSED):
        if name in stored.tensors and (name.endswith("_matrix") or 0 in stored.tensors[name].shape):
            own.append(name)
    return weight((rows, columns), format, {part: parts[part] for part in format.parts}, *own)
