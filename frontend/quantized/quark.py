"""The method "quark" of AMD: FP8, INT8 and MXFP4, with a scheme for all linears and others for single modules.

A scheme has the fields `weight`, `input_tensors`, `output_tensors` and `bias`, each a description of how numbers are
rounded (Quark, `quantization/config/config.py`; vLLM, `quantization/quark/`). A module stores `weight`, `weight_scale`
and, for activations with a fixed scale, `input_scale`.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.stored import Logical, Stored, Weight, input_scale, packing_of, scales_of, weight
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import source
from ingot.ir.stored.recipes import bitcast, check_scales

E4M3, POWERS = torch.float8_e4m3fn, torch.float8_e8m0fnu
_ELEMENTS = {"fp8_e4m3": "f8e4m3", "int8": "i8", "fp4": "f4e2m1"}
_DTYPES = {"f8e4m3": E4M3, "i8": torch.int8, "f4e2m1": torch.uint8}
# Fields about how scales were found.
_OBSERVED = (
    "observer_cls",
    "round_method",
    "scale_type",
    "is_scale_quant",
    "scale_calculation_mode",
    "mx_element_dtype",
)


@dataclass(frozen=True)
class Spec:
    """How numbers are rounded: an element type, the scheme of scales, and elements of a group; 0: there are none."""

    element: str
    scheme: str
    size: int
    dynamic: bool


@dataclass(frozen=True)
class ModuleScheme:
    """How a module is stored, and how its input is rounded; None: not at all."""

    weights: Spec
    inputs: Spec | None


def read_quark(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    whole = fields.object("global_quant_config")
    common = None if whole is None else _scheme(whole)
    layers = fields.object("layer_quant_config")
    own: list[tuple[str, ModuleScheme | None]] = []
    for pattern in layers.values if layers is not None else ():
        assert layers is not None
        given = layers.object(pattern)
        own.append((pattern, None if given is None else _scheme(given)))
    for name in ("layer_type_quant_config", "softmax_quant_spec", "kv_cache_quant_config"):
        if fields.values.get(name):
            raise fields.error(name, f"is {fields.values[name]!r:.80}", "empty")
        fields.skip(name)
    if (export := fields.object("export")) is not None:
        export.choice("pack_method", ("reorder", "order"), "reorder")  # of int4 alone
        export.choice("weight_format", ("real_quantized",), "real_quantized")
        if export.values.get("kv_cache_group"):
            raise export.error("kv_cache_group", f"is {export.values['kv_cache_group']!r:.80}", "empty")
        export.skip("kv_cache_group", "min_kv_scale", "weight_merge_groups")
        export.end()
    excluded = fields.names("exclude")
    fields.skip("quant_method", "quant_mode", "algo_config", "version", "log_severity_level", "kv_cache_post_rope")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("weight_scale"):
            scheme = next((made for pattern, made in own if fnmatch.fnmatchcase(module, pattern)), common)
            if scheme is None or any(_names(pattern, module) for pattern in excluded):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = _weight(stored, module, scheme)
        return Logical.of(stored, weights)

    return read


def _names(pattern: str, module: str) -> bool:
    return fnmatch.fnmatchcase(module, pattern) or module.endswith(f".{pattern}")


def _scheme(fields: Fields) -> ModuleScheme:
    weights, inputs = fields.object("weight"), fields.object("input_tensors")
    if weights is None:
        raise fields.error("weight", "is null", "a description of weights")
    for name in ("output_tensors", "bias"):
        if fields.object(name) is not None:
            raise fields.error(name, f"is {fields.values[name]!r:.80}", "null")
    fields.skip("target_device")
    made = ModuleScheme(_spec(weights), None if inputs is None else _spec(inputs))
    fields.end()
    if made.weights.dynamic:
        raise weights.error("is_dynamic", "is true for weights", "false")
    return made


def _spec(fields: Fields) -> Spec:
    element = _ELEMENTS[fields.choice("dtype", tuple(_ELEMENTS), "")]
    scheme = fields.choice("qscheme", ("per_tensor", "per_channel", "per_group"), "per_tensor")
    size = fields.get("group_size", int, 0)
    if element == "f4e2m1":
        fields.choice("scale_format", ("e8m0",), "e8m0")
        if (scheme, size) != ("per_group", 32):
            raise fields.error("group_size", f"is {size} with {scheme}", "32 with per_group")
    elif scheme == "per_group":
        raise fields.error("qscheme", "is 'per_group'", "per_tensor or per_channel")
    fields.choice("symmetric", (True,), True)
    fields.skip("ch_axis", "scale_format", *_OBSERVED)
    dynamic = fields.get("is_dynamic", bool, False)
    fields.end()
    return Spec(element, scheme, size, dynamic)


def _weight(stored: Stored, module: str, scheme: ModuleScheme) -> Weight:
    spec, name = scheme.weights, f"{module}.weight"
    found = stored.info(name, (_DTYPES[spec.element],), [])
    if len(found.shape) != 2:
        raise stored.error(f"{name} is {list(found.shape)}", "a matrix")
    shape = (found.shape[0], found.shape[1] * (2 if spec.element == "f4e2m1" else 1))
    if spec.size and shape[1] % spec.size:
        raise stored.error(f"rows of {shape[1]} elements of {module} are no multiple of {spec.size}", "whole groups")
    if spec.size:
        level, held = Scales(1, spec.size, dtype=POWERS), f"{module}.weight_scale"
        stored.info(held, (torch.uint8,), [level.grid(shape)])
        scales = check_scales(bitcast(source(held), POWERS))
    else:
        level = Scales(1 if spec.scheme == "per_channel" else 0, 0)
        scales, _ = scales_of(stored, f"{module}.weight_scale", level.grid(shape), wide=True)
    parts, rule, uses = {"weight": source(name), "scales": scales}, None, []
    if (inputs := scheme.inputs) is not None and inputs.dynamic:
        rule = Activations(inputs.element, inputs.size, POWERS if inputs.size else torch.float32)
    elif inputs is not None:
        if inputs.scheme != "per_tensor":
            raise stored.error(f"activations of {module} have a fixed scale {inputs.scheme}", "per_tensor")
        rule = Activations(inputs.element, dynamic=False, stored=True)
        parts["input_scale"] = input_scale(stored, f"{module}.input_scale")
        uses.append(f"{module}.input_scale")
    return weight(shape, format_of(spec.element, (level,), rule, packing_of(spec.element)), parts, *uses)
