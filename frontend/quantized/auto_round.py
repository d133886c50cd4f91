"""The methods "auto-round" and "inc" of Intel: weights as GPTQ or AWQ stores them, with a scheme for each module.

`packing_format` says which of the two: "auto_round:auto_gptq" or "auto_round:auto_awq". `extra_config` changes bits and
group size of single modules (auto-round, `export/export_to_autoround`).
"""

import re
from collections.abc import Callable
from dataclasses import replace

from ingot.frontend.quantized import awq, gptq
from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight

_SIZES = (-1, *(1 << power for power in range(3, 12)))
# Fields about how the weights were found.
_IRRELEVANT = (
    "quant_method",
    "autoround_version",
    "iters",
    "lr",
    "minmax_lr",
    "nsamples",
    "seqlen",
    "batch_size",
    "gradient_accumulate_steps",
    "low_gpu_mem_usage",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "enable_torch_compile",
    "enable_alg_ext",
    "dataset",
    "backend",
    "block_name_to_quantize",
    "to_quant_block_names",
    "quant_block_list",
    "scale_dtype",
    "amp",
    "super_bits",
    "super_group_size",
    "static_kv_dtype",
    "supported_types",
)


def read_auto_round(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    form = fields.choice(
        "packing_format",
        ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel", "auto_round"),
        "auto_round:auto_gptq",
    )
    fields.choice("data_type", ("int",), "int")
    fields.choice("act_bits", (16, 32), 16)
    fields.choice("act_data_type", ("float", "int"), "float")
    fields.skip("act_dynamic", "act_group_size", "act_sym")  # of activations that are not rounded
    fields.get("sym", bool, True)  # zero points are stored in either case
    scheme = _scheme(fields, gptq.Scheme(0, 0, 0 if form == "auto_round:gptqmodel" else 1))
    changes = []
    extra = fields.object("extra_config")
    for name in extra.values if extra is not None else ():
        assert extra is not None
        own = extra.object(name) or Fields({}, extra.where)
        # Bits of 16 and more say that a module is not quantized.
        kept = own.values.get("bits") if isinstance(own.values.get("bits"), int) else None
        changes.append((re.compile(f"{name}$|{re.escape(name)}$"), None if (kept or 0) >= 16 else _scheme(own, scheme)))
        own.skip("bits", "sym", "data_type", "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")
        own.skip("scale_dtype", "super_bits", "super_group_size", "in_blocks")
        own.end()
    ignored = matcher(fields.names("modules_to_not_convert"))
    fields.skip(*_IRRELEVANT)
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("qweight"):
            own = next((made for pattern, made in changes if pattern.match(module)), scheme)
            if own is None or ignored(module):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            if form == "auto_round:auto_awq":
                weights[f"{module}.weight"] = awq.read_weight(stored, module, own.size)
            else:
                weights[f"{module}.weight"] = gptq.read_weight(stored, module, own)
        return Logical.of(stored, weights)

    return read


def _scheme(fields: Fields, usual: gptq.Scheme) -> gptq.Scheme:
    bits = fields.choice("bits", gptq.BITS, usual.bits or 4)
    size = fields.choice("group_size", _SIZES, usual.size or (-1 if usual.bits else 128))
    return replace(usual, bits=bits, size=max(size, 0))
