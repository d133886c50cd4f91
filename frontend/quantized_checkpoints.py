"""Find the reader of a checkpoint's quantized weights, by the `quant_method` of its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.ir.recipe import Recipe

# Takes the quantization_config and a weight's name. Returns the recipe that computes the weight from stored tensors.
Reader = Callable[[Mapping[str, Any], str], Recipe]
# Older versions of compressed-tensors wrote compression_config.
FIELDS = ("quantization_config", "compression_config")

READERS: Mapping[str, Reader] = {}


def find_reader(config: Mapping[str, Any], where: str, readers: Mapping[str, Reader] = READERS) -> Reader | None:
    """Return the reader of a checkpoint's quantized weights; None if the weights are not quantized.

    A reader is a function that describes how a weight is computed from the stored tensors. `readers` maps values of
    `quant_method`, such as "gptq", to readers. `where` names the config.json in errors. Raises ConfigError if `readers`
    lacks the method.
    """
    field = next((name for name in FIELDS if config.get(name) is not None), None)
    if field is None:
        return None
    described = config[field]
    method = described.get("quant_method") if isinstance(described, dict) else None
    if isinstance(method, str) and method in readers:
        return readers[method]
    found = f"is quantized by '{method}'" if isinstance(method, str) else f"has a {field} without a quant_method"
    raise ConfigError(
        f"the checkpoint {found}, which cannot be read",
        where=f"{where}, field '{field}'",
        expected=" or ".join(
            [*(f"quant_method '{name}'" for name in readers), "a checkpoint of floating point weights"]
        ),
        hint='use the original checkpoint; --passes "default,quantize{format=int8}" quantizes it',
    )
