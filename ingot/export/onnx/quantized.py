"""Linears with quantized weights: as ONNX Runtime's MatMulNBits where a format fits, else with decoded weights.

MatMulNBits stores a weight [N, K] in blocks of a row, with one scale per block, and codes of 4 or 8 bits. A number is
`(code - zero) * scale`. Without zero points, zero is the middle code, 8 or 128.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from ingot.backends.onnx.model import ELEMENTS
from ingot.export.onnx.graph import UINT8, DecoderGraph, Weight
from ingot.ir.formats import ELEMENTS as CODES
from ingot.ir.formats import PARTS, Format, dequantize, find_format
from ingot.ir.program import tensor_type

# The sizes of blocks that MatMulNBits takes: powers of two from 16 (its documentation in ONNX Runtime's
# ContribOperators.md). Kernels for CPUs have sizes to 256.
_BLOCKS = (256, 128, 64, 32, 16)
_ELEMENTS = ("i4", "u4", "i8", "u8")
_FP32 = 1  # of accuracy_level: the input is not quantized


def unquantizable(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Return why a linear with a quantized weight has no form in ONNX, or "" if it has one."""
    format = find_format(given["format"])
    if format.activations is not None:
        return f"the format '{format.name}', which rounds activations"
    if len(tensor_type(given["x"]).shape) != 2:
        return f"quant_linear with x {tensor_type(given['x'])}"
    if odd := [one for one in _parts(given).values() if one.op != "placeholder" or one.meta["kind"] != "param"]:
        return f"quant_linear with '{odd[0].name}', which is no stored weight"
    return ""


def block_of(format: Format, columns: int) -> int:
    """Return the block size with which MatMulNBits stores weights of this format and row length; 0 if it cannot."""
    if format.element not in _ELEMENTS or format.ordered or format.rotated or len(format.levels) != 1:
        return 0
    level = format.levels[0]
    packing = "low_first" if CODES[format.element].bits == 4 else "plain"
    if format.packing != packing or level.offsets or level.rows != 1:
        return 0
    if CODES[format.element].offset not in (0, 8) or (level.zeros and format.element not in ("u4", "u8")):
        return 0
    group = level.columns or columns
    # A group may be cut into blocks with equal scales.
    return next((block for block in _BLOCKS if group % block == 0 and columns % block == 0), 0)


def quant_linear(graph: DecoderGraph, node: fx.Node, given: Mapping[str, Any]) -> None:
    """Translate a call of `quant_linear`."""
    parts, format = _parts(given), find_format(given["format"])
    params = {part: str(value.target) for part, value in parts.items()}
    rows, columns = format.shape_of(tuple(graph.params[params["weight"]].type.bind({}))[:2])
    columns = int(tensor_type(given["x"]).shape[-1])
    block = block_of(format, columns)
    if not block:
        name = f"{params['weight']}.decoded"
        graph.decoded[params["weight"]] = format.name
        make = partial(_decoded, format, tuple(parts))
        weight = graph.weight(Weight(name, ELEMENTS[torch.float32], (rows, columns), tuple(params.values()), make))
        bias = [] if given["bias"] is None else [graph.wide(given["bias"])]
        graph.result(node, graph.op("Gemm", graph.wide(given["x"]), weight, *bias, transB=1))
        return
    bits, blocks = CODES[format.element].bits, columns // block
    stored = params["weight"]
    inputs = [
        graph.wide(given["x"]),
        graph.weight(
            Weight(f"{stored}.codes", UINT8, (rows, blocks, block * bits // 8), (stored,), partial(_codes, format))
        ),
        graph.weight(
            Weight(
                f"{stored}.scales",
                ELEMENTS[torch.float32],
                (rows, blocks),
                (params["scales"],),
                partial(_scales, blocks),
            )
        ),
    ]
    if format.levels[0].zeros or format.element in ("u4", "u8"):
        source = params.get("zeros", stored)
        make = partial(_zeros, bits, blocks) if "zeros" in params else partial(_no_zeros, bits, blocks)
        shape = (rows, -(-blocks * bits // 8))
        inputs.append(graph.weight(Weight(f"{stored}.zeros", UINT8, shape, (source,), make)))
    attributes: dict[str, Any] = {"N": rows, "K": columns, "bits": bits, "block_size": block, "accuracy_level": _FP32}
    made = graph.custom("MatMulNBits", *inputs, **attributes)
    graph.state_type(made, torch.float32, "tokens", rows)
    if given["bias"] is not None:
        made = graph.op("Add", made, graph.wide(given["bias"]))
    graph.result(node, made)


def _parts(given: Mapping[str, Any]) -> dict[str, fx.Node]:
    return {part: given[part] for part in PARTS if given[part] is not None}


def _decoded(format: Format, parts: tuple[str, ...], *tensors: torch.Tensor) -> torch.Tensor:
    return dequantize(dict(zip(parts, tensors, strict=True)), format).float()


def _codes(format: Format, stored: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the codes. Codes of four bits are in the order of MatMulNBits already: low bits first."""
    if CODES[format.element].storage is torch.int8:
        return (stored.to(torch.int16) + 128).to(torch.uint8)
    return stored


def _scales(blocks: int, stored: torch.Tensor) -> torch.Tensor:
    return stored.float().repeat_interleave(blocks // stored.shape[1], 1)


def _zeros(bits: int, blocks: int, stored: torch.Tensor) -> torch.Tensor:
    zeros = stored.repeat_interleave(blocks // stored.shape[1], 1)
    if bits == 8:
        return zeros
    if blocks % 2:
        zeros = torch.cat((zeros, zeros.new_zeros(zeros.shape[0], 1)), 1)
    return zeros[:, 0::2] | (zeros[:, 1::2] << 4)


def _no_zeros(bits: int, blocks: int, stored: torch.Tensor) -> torch.Tensor:
    return torch.zeros(stored.shape[0], -(-blocks * bits // 8), dtype=torch.uint8)
