"""The method "modelopt" of NVIDIA: FP8, NVFP4 and MXFP8, described by nested or flat JSON.

The nested form has `producer` and `quantization`, as in hf_quant_config.json. The flat form has the same fields beside
`quant_method`. FP8 stores `weight_scale` and `input_scale`. NVFP4 stores blocks of 16 with a scale in f8e4m3, and
`weight_scale_2`, which multiplies all of them; `input_scale` is the same number for activations. MXFP8 stores blocks of
32 with a power of two as u8 (vLLM, `quantization/modelopt.py`).
"""

import fnmatch
from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.stored import Logical, Shape, Stored, Weight, input_scale, packing_of, scales_of, weight
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import Recipe, source
from ingot.ir.stored.recipes import bitcast, check_scales

E4M3, POWERS = torch.float8_e4m3fn, torch.float8_e8m0fnu
_METHODS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "NVFP4_FP8_MHA", "MXFP8")


def read_modelopt(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    nested = fields.object("quantization")
    inner = fields if nested is None else nested
    method = inner.choice("quant_algo", _METHODS, "")
    inner.choice("kv_cache_quant_algo", ("FP8", "INT8", "NONE"), "NONE")
    if (cache := inner.object("kv_cache_scheme")) is not None:
        cache.choice("num_bits", (8,), 8)
        cache.choice("type", ("int", "float"), "float")
        cache.skip("dynamic")
        cache.end()
    size = {"NVFP4": 16, "NVFP4_FP8_MHA": 16, "MXFP8": 32}.get(method, 0)
    if inner.get("group_size", int, size) != size:
        raise inner.error("group_size", f"is {inner.values['group_size']} for {method}", str(size))
    excluded = [*inner.names("exclude_modules", "ignore")]
    # The flat form repeats the method in the words of compressed-tensors.
    inner.skip("quant_method", "producer", "config_groups", "has_zero_point", "pre_quant_scale", "targets")
    for name in ("has_zero_point", "pre_quant_scale"):
        if inner.values.get(name):
            raise inner.error(name, "is true", "false")
    fields.skip("quant_method", "producer")
    fields.end()
    inner.end()
    make = {"FP8": _fp8, "MXFP8": _mxfp8}.get(method, _fp8_rows if method.startswith("FP8_PER") else _nvfp4)

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("weight_scale"):
            if any(_excludes(pattern, module) for pattern in excluded):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = make(stored, module)
        return Logical.of(stored, weights)

    return read


def _excludes(pattern: str, module: str) -> bool:
    """Return whether a pattern with "*" names a module or one that contains it."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")


def _matrix(stored: Stored, module: str, dtype: torch.dtype) -> Shape:
    found = stored.info(f"{module}.weight", (dtype,), [])
    if len(found.shape) != 2:
        raise stored.error(f"{module}.weight is {list(found.shape)}", "a matrix")
    return found.shape


def _input(stored: Stored, module: str) -> tuple[Recipe, str]:
    return input_scale(stored, f"{module}.input_scale"), f"{module}.input_scale"


def _fp8(stored: Stored, module: str) -> Weight:
    shape = _matrix(stored, module, E4M3)
    scales, _ = scales_of(stored, f"{module}.weight_scale", (1, 1), wide=True)
    given, name = _input(stored, module)
    format = format_of("f8e4m3", (Scales(0, 0),), Activations("f8e4m3", dynamic=False, stored=True))
    return weight(shape, format, {"weight": source(f"{module}.weight"), "scales": scales, "input_scale": given}, name)


def _fp8_rows(stored: Stored, module: str) -> Weight:
    shape = _matrix(stored, module, E4M3)
    scales, _ = scales_of(stored, f"{module}.weight_scale", (shape[0], 1), wide=True)
    format = format_of("f8e4m3", (Scales(),), Activations("f8e4m3"))
    return weight(shape, format, {"weight": source(f"{module}.weight"), "scales": scales})


def _nvfp4(stored: Stored, module: str) -> Weight:
    rows, packed = _matrix(stored, module, torch.uint8)
    columns = packed * 2
    _check_groups(stored, module, columns, 16)
    stored.info(f"{module}.weight_scale", (E4M3,), [(rows, columns // 16)])
    outer, _ = scales_of(stored, f"{module}.weight_scale_2", (1, 1), wide=True)
    parts = {
        "weight": source(f"{module}.weight"),  # the low four bits first, as in Ingot's packing
        "scales": check_scales(source(f"{module}.weight_scale"), zero=True),
        "outer": outer,
    }
    rule, uses = None, []
    if f"{module}.input_scale" in stored.tensors:  # without it, only weights are quantized
        parts["input_scale"], name = _input(stored, module)
        rule, uses = Activations("f4e2m1", 16, E4M3, stored=True), [name]
    levels = Scales(1, 16, dtype=E4M3), Scales(0, 0)
    return weight((rows, columns), format_of("f4e2m1", levels, rule, packing_of("f4e2m1")), parts, *uses)


def _mxfp8(stored: Stored, module: str) -> Weight:
    rows, columns = _matrix(stored, module, E4M3)
    _check_groups(stored, module, columns, 32)
    stored.info(f"{module}.weight_scale", (torch.uint8,), [(rows, columns // 32)])
    scales = check_scales(bitcast(source(f"{module}.weight_scale"), POWERS))
    format = format_of("f8e4m3", (Scales(1, 32, dtype=POWERS),), Activations("f8e4m3", 32, POWERS))
    return weight((rows, columns), format, {"weight": source(f"{module}.weight"), "scales": scales})


def _check_groups(stored: Stored, module: str, columns: int, size: int) -> None:
    if columns % size:
        raise stored.error(
            f"rows of {columns} elements of {module} are no multiple of the group of {size}", "whole groups"
        )
