"""The method "fbgemm_fp8" (Llama 3.1 405B): weights in f8e4m3 with a scale for each row, activations token by token.

A token's scale is its largest magnitude / 448, and at most `activation_scale_ub` / 448. Larger elements saturate
(FBGEMM, `quantize_fp8_per_row` with `scale_ub`).
"""

from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, scales_of, weight
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import source

E4M3 = torch.float8_e4m3fn


def read_fbgemm_fp8(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    bound = float(fields.get("activation_scale_ub", (float, int), 1200.0))
    if not bound > 0:
        raise fields.error("activation_scale_ub", f"is {bound}", "a positive number")
    ignored = matcher(fields.names("modules_to_not_convert"))
    fields.skip("quant_method")
    fields.end()
    format = format_of("f8e4m3", (Scales(),), Activations("f8e4m3", bound=bound))

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("weight"):
            found = stored.tensors[f"{module}.weight"]
            if found.dtype is not E4M3:
                continue
            if ignored(module) or len(found.shape) != 2:
                raise stored.error(
                    f"{module}.weight is quantized, {list(found.shape)}", "a matrix that is not excluded"
                )
            scales, _ = scales_of(stored, f"{module}.weight_scale", (found.shape[0], 1), wide=True)
            uses = [name for name in (f"{module}.input_scale_ub",) if name in stored.tensors]
            for name in uses:
                stored.check_number(name)
                if float(stored.read(name)) != bound:
                    raise stored.error(f"{name} is {float(stored.read(name))}", f"activation_scale_ub, {bound}")
            parts = {"weight": source(f"{module}.weight"), "scales": scales}
            weights[f"{module}.weight"] = weight(found.shape, format, parts, *uses)
        return Logical.of(stored, weights)

    return read
