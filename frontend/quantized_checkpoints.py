"""Checkpoints whose weights are quantized already: a table of readers, by the `quant_method` of the config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from ingot.ir.errors import ConfigError
from ingot.ir.recipe import Recipe

# From the quantization_config and the name of a weight to the recipe of its values, of the tensors that stand for it.
Reader = Callable[[Mapping[str, Any], str], Recipe]
# compression_config is what compressed-tensors wrote before it took the name that all others use.
FIELDS = ("quantization_config", "compression_config")

READERS: Mapping[str, Reader] = {}


def find_reader(config: Mapping[str, Any], where: str, readers: Mapping[str, Reader] = READERS) -> Reader | None:
    """What reads the weights of a checkpoint, by its config.json; None for weights that are stored as numbers.

    `where` names the file. Raises ConfigError when no reader knows the method: read as they lie, the weights would be
    other numbers.
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
        hint='give the checkpoint that it was quantized from; --passes "default,quantize{format=int8}" quantizes that',
    )
