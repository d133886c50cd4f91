"""The method "awq" in the order of its GEMM kernel: integers of four bits, with zero points, packed along the outputs.

A module stores `qweight` i32[K, N / 8], `qzeros` i32[groups, N / 8] and `scales` f16[groups, N]. A word holds eight
outputs, and its nibble i is output (0, 2, 4, 6, 1, 3, 5, 7)[i] (AutoAWQ, `awq/utils/packing_utils.py`).
"""

from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, packing_of, weight
from ingot.ir.formats import Scales, format_of
from ingot.ir.recipe import Recipe, permute, source
from ingot.ir.stored.recipes import check_scales, pack, unpack

# The nibble of each output: the inverse of the order above.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_SIZES = (-1, *(1 << power for power in range(3, 12)))
_IRRELEVANT = ("quant_method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")


def read_awq(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    for name in ("bits", "w_bit"):
        fields.choice(name, (4,), 4)
    sizes = {fields.choice(name, _SIZES, 0) for name in ("group_size", "q_group_size") if fields.values.get(name)}
    fields.skip("group_size", "q_group_size")
    if len(sizes) > 1:
        raise fields.error("q_group_size", "is another one than group_size", "one size")
    size = max(sizes.pop(), 0) if sizes else 128
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    symmetric = not fields.get("zero_point", bool, True)
    ignored = matcher(fields.names("modules_to_not_convert"))
    fields.skip(*_IRRELEVANT)
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("qweight"):
            if ignored(module):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = read_weight(stored, module, size, symmetric=symmetric)
        return Logical.of(stored, weights)

    return read


def _outputs(name: str, count: int) -> Recipe:
    return permute(unpack(source(name), 4, 1, count, ORDER), (1, 0))


def read_weight(stored: Stored, module: str, size: int, *, symmetric: bool = False) -> Weight:
    """Return the weight of a module with groups of `size` inputs; 0: all. Symmetric ones store no zero points, which
    are 8."""
    packed = stored.info(f"{module}.qweight", (torch.int32,), [])
    if len(packed.shape) != 2:
        raise stored.error(f"{module}.qweight is {list(packed.shape)}", "a matrix of words")
    columns, rows = packed.shape[0], packed.shape[1] * 8
    size = size or columns
    if columns % size:
        raise stored.error(
            f"{columns} inputs of {module} are no multiple of the group of {size}", "a group size that divides them"
        )
    found = stored.info(f"{module}.scales", (torch.float16, torch.bfloat16, torch.float32), [(columns // size, rows)])
    stored_zeros = f"{module}.qzeros" in stored.tensors or not symmetric
    element = "u4" if stored_zeros else "i4"
    parts = {
        "weight": pack(_outputs(f"{module}.qweight", rows), packing_of(element)),
        "scales": permute(check_scales(source(f"{module}.scales")), (1, 0)),
    }
    if stored_zeros:
        stored.info(f"{module}.qzeros", (torch.int32,), [(columns // size, rows // 8)])
        parts["zeros"] = _outputs(f"{module}.qzeros", rows)
    level = Scales(1, size if size < columns else 0, zeros=stored_zeros, dtype=found.dtype)
    return weight((rows, columns), format_of(element, (level,), None, packing_of(element)), parts)
