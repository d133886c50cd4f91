"""vLLM's names of quantization: the formats that a checkpoint of floats is rounded to, and the methods that quantized a
checkpoint.

Names are those of vLLM (`vllm/model_executor/layers/quantization/__init__.py`, and `vllm/config/quantization.py` for
what vLLM rounds while it loads a checkpoint).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.ir.errors import OptionError

# Formats that vLLM rounds floats to. Scales of activations are for a token, where vLLM may have one for the batch.
# bitsandbytes rounds to nf4 with blocks of 64, and then rounds its scales too; here scales stay float32.
_FORMATS: Mapping[str, str] = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8_block128",
    "fp8_per_channel": "fp8_per_channel_per_token",
    "ptpc_fp8": "fp8_per_channel_per_token",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "bitsandbytes": "nf4",
}

# The values of `quant_method` in config.json that each name stands for. vLLM has several names for the kernels of a
# method.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "fp_quant": ("fp_quant",),
    "compressed-tensors": ("compressed-tensors",),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), ("gptq",)),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin", "cpu_awq"), ("awq",)),
    "moe_wna16": ("gptq", "awq"),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), ("modelopt",)),
    "bitsandbytes": ("bitsandbytes",),
    "quark": ("quark",),
    "torchao": ("torchao",),
    "experts_int8": ("experts_int8",),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), ("mxfp4",)),
    **dict.fromkeys(("inc", "auto-round"), ("auto-round", "intel/auto-round", "inc")),
    "gguf": ("gguf",),
}

_OF_EXPERTS = "it rounds the weights of experts alone, and keeps all others"
# name -> why Ingot refuses it
_REFUSED: Mapping[str, str] = {
    "int8_per_channel_weight_only": _OF_EXPERTS,
    "nvfp4_per_token": _OF_EXPERTS,
    "lut_b_moe": _OF_EXPERTS,
    "online": "it needs a quantization_config, which Ingot does not take",
    "deepseek_v4_fp8": "Ingot does not read the checkpoints of this model",
    "humming": "it names kernels that Ingot does not have",
}


@dataclass(frozen=True)
class Quantization:
    """What an argument `quantization` stands for.

    format    the format that a checkpoint of floats is rounded to, as in `compile-model --quantize`; None: a checkpoint
              of floats is refused
    methods   values of `quant_method` in config.json. A checkpoint that one of them quantized keeps its weights
    """

    format: str | None
    methods: tuple[str, ...]


def read_quantization(name: object) -> Quantization:
    """Return what vLLM's argument `quantization` stands for. Raises OptionError for a name that Ingot does not take."""
    known = _FORMATS.keys() | _METHODS.keys()
    if not isinstance(name, str) or name not in known:
        reason = _REFUSED.get(name) if isinstance(name, str) else None
        raise OptionError(
            f"quantization = {name!r:.80} is not supported",
            where="EngineArgs.quantization",
            expected=f"None, {', '.join(sorted(known))}",
            hint=reason or "leave it out for a quantized checkpoint; compile-model --quantize has more formats",
        )
    return Quantization(_FORMATS.get(name), _METHODS.get(name, ()))
