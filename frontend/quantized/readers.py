"""Find the reader of a checkpoint's quantized weights, by the `quant_method` of its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from ingot.frontend.quantized.auto_round import read_auto_round
from ingot.frontend.quantized.awq import read_awq
from ingot.frontend.quantized.bitsandbytes import read_bitsandbytes
from ingot.frontend.quantized.compressed_tensors import read_compressed_tensors
from ingot.frontend.quantized.experts import read_experts_int8, read_mxfp4
from ingot.frontend.quantized.fbgemm_fp8 import read_fbgemm_fp8
from ingot.frontend.quantized.fields import ORIGINAL, Fields
from ingot.frontend.quantized.fp8 import read_fp8
from ingot.frontend.quantized.fp_quant import read_fp_quant
from ingot.frontend.quantized.gptq import read_gptq
from ingot.frontend.quantized.modelopt import read_modelopt
from ingot.frontend.quantized.quark import read_quark
from ingot.frontend.quantized.stored import Logical, Stored
from ingot.frontend.quantized.torchao import read_torchao
from ingot.ir.errors import ConfigError

# Checks the fields of a quantization_config, and returns a function that finds the weights among stored tensors.
Reader = Callable[[Fields], Callable[[Stored], Logical]]
# Older versions of compressed-tensors wrote compression_config.
FIELDS = ("quantization_config", "compression_config")

READERS: Mapping[str, Reader] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "modelopt": read_modelopt,
    "fbgemm_fp8": read_fbgemm_fp8,
    "fp_quant": read_fp_quant,
    "mxfp4": read_mxfp4,
    "experts_int8": read_experts_int8,
    "quark": read_quark,
    "torchao": read_torchao,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "inc": read_auto_round,
}


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return the method that quantized a checkpoint's weights, by its config.json; None if they are not quantized.

    It is "" if the description has no `quant_method`.
    """
    described = next((config[name] for name in FIELDS if config.get(name) is not None), None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    return method if isinstance(method, str) else ""


def find_reader(
    config: Mapping[str, Any], where: str, readers: Mapping[str, Reader] = READERS
) -> Callable[[Stored], Logical] | None:
    """Return the reader of a checkpoint's quantized weights; None if the weights are not quantized.

    The reader takes the stored tensors and returns the checkpoint's weights. `readers` maps values of `quant_method`,
    such as "gptq", to functions that make readers. `where` names the config.json in errors. Raises ConfigError if
    `readers` lacks the method, or if a field is not understood.
    """
    field = next((name for name in FIELDS if config.get(name) is not None), None)
    if field is None:
        return None
    place, method = f"{where}, field '{field}'", quant_method(config)
    if method is not None and method in readers:
        return readers[method](Fields(config[field], place))
    found = f"is quantized by '{method}'" if method else f"has a {field} without a quant_method"
    raise ConfigError(
        f"the checkpoint {found}, which cannot be read",
        where=place,
        expected=" or ".join(
            [*(f"quant_method '{name}'" for name in readers), "a checkpoint of floating point weights"]
        ),
        hint=ORIGINAL,
    )
