"""The weights of compressed-tensors checkpoints: from a scheme and stored tensors to a format and its parts."""

import math
from dataclasses import dataclass, replace

import torch

from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.stored import (
    Stored,
    Weight,
    columns_order,
    input_scale,
    packing_of,
    scales_of,
    weight,
)
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import Recipe, reshape, source
from ingot.ir.stored.recipes import bitcast, check_scales, gather, pack, reciprocal, shift, unpack

E4M3, POWERS = torch.float8_e4m3fn, torch.float8_e8m0fnu
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
_FLOATS = {4: "f4e2m1", 6: "f6e2m3", 8: "f8e4m3"}
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")


@dataclass(frozen=True)
class Args:
    """How numbers are quantized: `QuantizationArgs` of compressed-tensors.

    block   the rows and columns that share a scale; 0: all of them
    local   whether scales of groups are dynamic, and a static scale is for the whole tensor
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    block: tuple[int, int]
    dynamic: bool
    local: bool

    @staticmethod
    def of(fields: Fields) -> "Args":
        """Return the args of an object in the config. Raises ConfigError."""
        kind = fields.choice("type", ("int", "float"), "int")
        bits = fields.choice("num_bits", tuple(_FLOATS) if kind == "float" else tuple(range(1, 9)), 8)
        size = fields.get("group_size", int, 0)
        usual = "group" if size > 0 else "channel" if size == -1 else "tensor"
        strategy = fields.choice("strategy", _STRATEGIES, usual)
        blocks = fields.get("block_structure", (list, str), [])
        blocks = [int(one) for one in blocks.split("x")] if isinstance(blocks, str) else blocks
        if strategy == "block" and (len(blocks) != 2 or not all(isinstance(one, int) and one > 0 for one in blocks)):
            raise fields.error("block_structure", f"is {blocks!r:.80}", "two sizes, such as [128, 128]")
        if strategy in ("group", "tensor_group") and size <= 0:
            raise fields.error("group_size", f"is {size}", "a positive number")
        dynamic = fields.choice("dynamic", (True, False, "local"), False)
        # In what order GPTQ saw the columns, and how it observed them. `weight_g_idx` says which group a column has.
        fields.skip("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        symmetric = fields.get("symmetric", bool, True)
        fields.end()
        block = {
            "tensor": (0, 0),
            "channel": (1, 0),
            "token": (1, 0),
            "group": (1, size),
            "tensor_group": (1, size),
            "block": (int(blocks[0]), int(blocks[1])) if strategy == "block" else (0, 0),
        }[strategy]
        return Args(bits, kind, symmetric, strategy, block, dynamic is True, dynamic == "local")


def read_weight(stored: Stored, module: str, args: Args, inputs: Args | None, format: str) -> Weight:
    """Return the weight of a module. Raises CheckpointError if what is stored does not fit its scheme."""
    rule, parts = _activations(stored, module, inputs, format)
    made = (_float_weight if args.kind == "float" else _int_weight)(stored, module, args, rule, parts, format)
    # Modules with equal numbers share one tensor; each has its own in the checkpoint.
    own = {f"{module}.{part}" for part in ("input_scale", "input_global_scale")} if parts else set()
    return replace(made, uses=made.uses | (own & stored.tensors.keys()))


def _activations(
    stored: Stored, module: str, args: Args | None, format: str
) -> tuple[Activations | None, dict[str, Recipe]]:
    """Return the rule for activations, and the stored number that it needs."""
    if args is None:
        return None, {}
    elements = _FLOATS if args.kind == "float" else {8: "i8", 4: "i4"}
    if args.bits not in elements or not args.symmetric:
        kind = "" if args.symmetric else "with zero points "
        raise stored.error(
            f"activations of {module} are {args.kind}{args.bits} {kind}which cannot be computed",
            "symmetric int8, int4, float8 or float4",
        )
    element, group = elements[args.bits], args.block[1]
    if args.local:
        name = f"{module}.input_global_scale"
        stored.check_number(name)
        scale = reshape(reciprocal(source(stored.same(name))), (1,))
        return Activations(element, group, E4M3, stored=True), {"input_scale": scale}
    if not args.dynamic:
        if args.strategy != "tensor":
            raise stored.error(
                f"activations of {module} have a fixed scale for each {args.strategy}", "one for a tensor"
            )
        return Activations(element, stored=True, dynamic=False), {
            "input_scale": input_scale(stored, f"{module}.input_scale")
        }
    powers = format.startswith("mx") and group == 32
    return Activations(element, group, POWERS if powers else torch.float32), {}


def _int_weight(
    stored: Stored, module: str, args: Args, rule: Activations | None, parts: dict[str, Recipe], format: str
) -> Weight:
    packed = format == "pack-quantized"
    (rows, columns), uses = _shape(stored, module, args.bits) if packed else (_matrix(stored, module), ())
    level = Scales(*args.block, zeros=not args.symmetric)
    grid = _grid(stored, module, level, (rows, columns))
    half = 1 << (args.bits - 1)
    if packed:
        codes = unpack(source(f"{module}.weight_packed"), args.bits, 1, columns)
    else:
        stored.info(f"{module}.weight", (torch.int8,), [(rows, columns)])
        codes = shift(bitcast(source(f"{module}.weight"), torch.uint8), half, args.bits)
    element = ("i" if args.symmetric else "u") + ("4" if args.bits <= 4 else "8")
    if args.symmetric:
        codes = shift(codes, 8 - half, 4) if args.bits < 4 else codes
        if args.bits > 4:
            codes = bitcast(shift(codes, 256 - half, 8), torch.int8)
    order = columns_order(stored, f"{module}.weight_g_idx", columns, args.block[1])
    if order is not None:
        codes, parts = gather(codes, order, 1), {**parts, "order": order}
    if f"{module}.weight_g_idx" in stored.tensors:
        uses = (*uses, f"{module}.weight_g_idx")
    scales, dtype = scales_of(stored, f"{module}.weight_scale", grid, wide=args.block[1] == 0 or args.block[0] > 1)
    made = {"weight": pack(codes, packing_of(element)), "scales": scales, **parts}
    if not args.symmetric:
        made["zeros"] = _zeros(stored, f"{module}.weight_zero_point", grid, args.bits, packed=packed)
    elif f"{module}.weight_zero_point" in stored.tensors:
        uses = (*uses, _no_zeros(stored, f"{module}.weight_zero_point"))
    levels = (Scales(level.rows, level.columns, level.zeros, dtype),)
    made_of = format_of(element, levels, rule, packing_of(element), ordered=order is not None)
    return weight((rows, columns), made_of, made, *uses)


def _shape(stored: Stored, module: str, bits: int) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Return the shape of a packed weight, and the names of the tensors that only describe it."""
    name = f"{module}.weight_shape"
    stored.info(name, (torch.int64, torch.int32), [(2,)])
    rows, columns = (int(size) for size in stored.read(name))
    words = -(-columns * bits // 32)
    stored.info(f"{module}.weight_packed", (torch.int32,), [(rows, words)])
    return (rows, columns), (name,)


def _matrix(stored: Stored, module: str) -> tuple[int, int]:
    found = stored.tensors.get(f"{module}.weight")
    if found is None or len(found.shape) != 2:
        raise stored.error(f"the checkpoint has no matrix {module}.weight", "the weight of its scales")
    return found.shape[0], found.shape[1]


def _grid(stored: Stored, module: str, level: Scales, shape: tuple[int, int]) -> tuple[int, int]:
    if level.columns and level.rows == 1 and shape[1] % level.columns:
        raise stored.error(
            f"rows of {shape[1]} elements of {module}.weight are no multiple of the group of {level.columns}",
            "a group size that divides the rows",
        )
    return level.grid(shape)


def _zeros(stored: Stored, name: str, grid: tuple[int, int], bits: int, *, packed: bool) -> Recipe:
    """Return the recipe of zero points as codes: the stored numbers are signed, or packed with half the range added."""
    if packed:
        stored.info(name, (torch.int32,), [(math.ceil(grid[0] * bits / 32), grid[1])])
        return unpack(source(name), bits, 0, grid[0])
    info = stored.info(name, (torch.int8,), [grid, grid[:1], ()])
    codes = shift(bitcast(source(name), torch.uint8), 1 << (bits - 1), bits)
    return codes if tuple(info.shape) == grid else reshape(codes, grid)


def _no_zeros(stored: Stored, name: str) -> str:
    """Check that zero points of a symmetric scheme are all zero. Older versions store them."""
    if bool(stored.read(name).double().any()):
        raise stored.error(f"{name} has zero points, but the scheme is symmetric", "zeros")
    return name


def _float_weight(
    stored: Stored, module: str, args: Args, rule: Activations | None, parts: dict[str, Recipe], format: str
) -> Weight:
    if not args.symmetric:
        raise stored.error(f"{module}.weight is {format} with zero points", "symmetric floats")
    uses: tuple[str, ...] = ()
    if args.bits == 8:
        shape = _matrix(stored, module)
        stored.info(f"{module}.weight", (E4M3,), [shape])
        codes = source(f"{module}.weight")
    else:
        found = stored.info(f"{module}.weight_packed", (torch.uint8,), [])
        if len(found.shape) != 2:
            raise stored.error(f"{module}.weight_packed is {list(found.shape)}", "a matrix")
        shape = found.shape[0], found.shape[1] * 8 // args.bits
        codes = source(f"{module}.weight_packed")
        codes = codes if args.bits == 4 else unpack(codes, args.bits, 1, shape[1])
    level = Scales(*args.block)
    grid, name = _grid(stored, module, level, shape), f"{module}.weight_scale"
    if format.startswith("mxfp"):
        stored.info(name, (torch.uint8,), [grid])
        scales, dtype = check_scales(bitcast(source(name), POWERS)), POWERS
    elif args.strategy == "tensor_group":
        stored.info(name, (E4M3,), [grid])
        scales, dtype = check_scales(source(name), zero=True), E4M3
    else:
        scales, dtype = scales_of(stored, name, grid, wide=args.block[1] == 0 or args.block[0] > 1)
    levels: tuple[Scales, ...] = (Scales(level.rows, level.columns, dtype=dtype),)
    made = {"weight": codes, "scales": scales, **parts}
    if args.strategy == "tensor_group":
        # The checkpoint stores the factor by which scales were multiplied before they were rounded, so divide by it.
        held = f"{module}.weight_global_scale"
        stored.check_number(held)
        made["outer"], levels = reshape(reciprocal(source(held)), (1, 1)), (*levels, Scales(0, 0))
    if f"{module}.weight_zero_point" in stored.tensors:
        uses = (*uses, _no_zeros(stored, f"{module}.weight_zero_point"))
    element = _FLOATS[args.bits]
    return weight(shape, format_of(element, levels, rule, packing_of(element)), made, *uses)
