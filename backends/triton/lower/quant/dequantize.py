"""Lowering of the op `dequantize`, which writes a quantized weight as a matrix."""

from collections.abc import Mapping

import torch

from ingot.backends.triton.kernels.quant.dequantize import dequantize
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.linear.weight import stored_weight
from ingot.backends.triton.lower.quant.form import form_of
from ingot.backends.triton.lower.quant.prepared_rows import KERNEL_DTYPES
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.formats import find_format

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns and elements of a tile. 512 columns of 16 bits are 1 KiB of a row. A thread has 32 elements: one load of 16
# bytes where they have four bits.
_COLUMNS = 512
_ELEMENTS = 4096
_WARPS = 4


def _dequantize(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launch of a call of `dequantize` to `schedule`, and return the result.

    Raises Refused if the kernel does not read the format.
    """
    format, (target,) = find_format(call.attributes["format"]), call.results
    call.want(not format.ordered, f"format {format.name}: no kernel that writes columns in another order")
    call.want(target.dtype in _DTYPES, f"no kernel that writes {target}")
    weight = stored_weight(format, {part: call.value(part) for part in format.parts})
    form = form_of(weight, target.dtype, schedule.sm)
    parts = max(1, min(_COLUMNS, power_of_two(weight.depth)) // form.block_k)
    columns = parts * form.block_k
    rows = min(max(1, _ELEMENTS // columns), power_of_two(weight.rows))
    result = schedule.output(target)
    schedule.launch(
        dequantize,
        (-(-weight.depth // columns), -(-weight.rows // rows)),
        {**{part: weight.part(part) for part in ("weight", "scales", "zeros", "outer")}, "result": result},
        {
            "N": weight.rows,
            "K": weight.depth,
            "ROWS": rows,
            "PARTS": parts,
            "COLUMNS": form.block_k,
            "ELEMENTS": form.elements,
            "DTYPE": KERNEL_DTYPES[target.dtype],
            "DEPENDENT": schedule.dependent,
        },
        warps=_WARPS,
        dependent=schedule.dependent,
    )
    return (result,)


LOWERINGS: Mapping[str, Lowering] = {"dequantize": _dequantize}
