"""The form in which kernels read a quantized weight and its x, by the format of the weight."""

import math
from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.kernels.quant.constants import Elements, Rounded
from ingot.backends.triton.lower.linear.call import static_size
from ingot.backends.triton.lower.linear.weight import Weight
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value
from ingot.ir.formats import ELEMENTS, Format
from ingot.ir.machine.gpus import FEATURES
from ingot.ir.types import DTYPE_NAMES

# Element types that the kernels read, with the dtype in which tensor cores of the capability multiply them as they are.
_READ = ("f8e4m3", "i8", "u8", "i4", "u4", "f4e2m1")
_NATIVE = {"f8e4m3": (torch.float8_e4m3fn, 89), "i8": (torch.int8, 80)}
_ROUNDED = ("f8e4m3", "i8")
# The element type, and dtype of scales, that Triton converts only with instructions that some GPUs lack.
_CONVERTED = "f8e4m3"
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_POWERS = torch.float8_e8m0fnu
# Columns of a block, and the least: 32 bytes are the depth of a tensor-core instruction. float32 uses no tensor cores,
# and a larger block would not fit into registers.
_COLUMNS = 128
_COLUMNS_F32 = 32
_LEAST_BYTES = 32
# The least columns of a block of four-bit elements: the depth of an instruction in 16 bits.
_LEAST_FOUR_BITS = 16
# The powers of two by which elements with their scales are made smaller, by the dtype of x. In bf16, a factor is the
# scale times 2^126, and must not be larger than its largest number. Scales from 2^-62 to 2^65 are then exact. Larger
# ones are refused as damaged (`check_scales`).
_FOLDS = {torch.float32: 0, torch.bfloat16: 64}
# Conversions of `quant_elements` by instructions that this compute capability has.
_ASSEMBLY = 90


@dataclass(frozen=True)
class StoredForm:
    """How kernels read a quantized weight and x.

    elements   how the weight is stored
    rounded    how x is rounded before the matmul
    codes      the dtype of x as the matmul reads it
    block_k    the columns of a part of the weight whose sum has one scale; a block has one or several
    """

    elements: Elements
    rounded: Rounded
    codes: torch.dtype
    block_k: int


def form_of(weight: Weight, dtype: torch.dtype, sm: int) -> StoredForm:
    """Return how kernels read the quantized weight of a matmul with an x of `dtype`, on compute capability `sm`.

    Raises Refused if they do not support its format.
    """
    format, depth = weight.format, weight.depth
    assert format is not None
    _check(format)
    used = (format.element, format.activations and format.activations.element, DTYPE_NAMES[format.levels[0].dtype])
    if sm not in FEATURES["fp8"] and _CONVERTED in used:
        raise Refused(f"format {format.name}: {_CONVERTED} needs {FEATURES['fp8'].needs}")
    _check_dense(weight)
    level, element = format.levels[0], ELEMENTS[format.element]
    rounded = rounding_of(format)
    x_columns = rounded.columns
    four = element.bits == 4
    block = _COLUMNS_F32 if dtype is torch.float32 and not four else _COLUMNS
    for columns in (level.columns, x_columns):
        block = _block(block, columns, format.name)
    if block < (_LEAST_FOUR_BITS if four else _LEAST_BYTES):
        raise Refused(f"format {format.name}: no kernel for scales of {block} columns")
    if four and depth % block:
        raise Refused(f"format {format.name}: rows of {depth} elements are no multiple of {block}")
    codes = dtype
    if rounded.element == format.element and dtype is not torch.float32 and not level.zeros:
        native, least = _NATIVE[format.element]
        # Tensor cores of an H800 add up f8e4m3 with some 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3):
        # enough for a result of 8 bits in bf16, but tests in f16, with 11 bits, found errors above its tolerance.
        short = native is torch.float8_e4m3fn and dtype is torch.float16
        codes = native if sm >= least and not short else dtype
    scales = weight.part("scales")
    assert scales is not None
    return StoredForm(
        Elements(
            element=format.element,
            chunk=block if four else 0,
            words=depth // 4 if four else depth,
            offset=element.offset,
            assembly=sm >= _ASSEMBLY and dtype is not torch.float32,
            scale_rows=level.rows,
            scale_columns=level.columns,
            scale_stride=static_size(scales.type.shape[1]),
            scale_kind="e8m0" if level.dtype is _POWERS else "float",
            outer_rows=format.levels[1].rows if len(format.levels) > 1 else -1,
            zeros=level.zeros,
            x_columns=x_columns,
            x_scales="none" if rounded.element == "none" else "tensor" if rounded.stored else "token",
        ),
        rounded,
        codes,
        block,
    )


def with_folded_scales(form: StoredForm, format: Format, depth: int, dtype: torch.dtype) -> StoredForm:
    """Return the form in which matmuls of several tokens read a weight with `depth` columns and an x of `dtype`.

    If elements times scales are exact in `dtype`, elements are multiplied by their scales: products of f4e2m1 with a
    power of two, or with an f8e4m3 number, have at most six significant bits. A part then has the columns of several
    groups. Otherwise the form is returned unchanged, and a scale multiplies the sum over its group.
    """
    level, columns = format.levels[0], form.elements.scale_columns
    fold = _FOLDS.get(dtype)
    if fold is None or format.element != "f4e2m1" or not columns or level.dtype not in (_POWERS, torch.float8_e4m3fn):
        return form
    if form.rounded.element != "none" or level.rows != 1 or columns % 4:
        return form
    block = _COLUMNS
    while depth % block:
        block //= 2
    if block % columns:
        return form
    return replace(form, elements=replace(form.elements, chunk=block, fold=fold), block_k=block)


def _check(format: Format) -> None:
    """Raise Refused if the kernels do not read the elements, scales or order of a format."""
    name, rule = format.name, format.activations
    if format.element not in _READ:
        raise Refused(f"format {name}: no kernel for elements {format.element}")
    if format.levels[0].offsets:
        raise Refused(f"format {name}: no kernel for offsets")
    if any(level.columns for level in format.levels[1:]):
        raise Refused(f"format {name}: no kernel for a second level of scales of groups of columns")
    if any(level.dtype not in _SCALES or (nth and level.dtype is _POWERS) for nth, level in enumerate(format.levels)):
        raise Refused(f"format {name}: no kernel for scales of this dtype")
    if format.ordered and rule is not None and rule.columns:
        raise Refused(f"format {name}: no kernel for columns in another order, and groups of activations")
    if format.rotated:
        raise Refused(f"format {name}: no kernel that rotates the input or the result")
    if format.packing != ("low_first" if ELEMENTS[format.element].bits == 4 else "plain"):
        raise Refused(f"format {name}: no kernel for the packing '{format.packing}'")
    rounding_of(format)


def _check_dense(weight: Weight) -> None:
    for value in weight.parts:
        dense = Value(type(value.type)(value.type.dtype, value.type.shape))
        if value.strides != dense.strides:
            raise Refused(f"a part of a quantized weight that is not dense: {value.type}")


def rounding_of(format: Format) -> Rounded:
    """Return how kernels round activations for a format. Raises Refused if they do not round so."""
    rule = format.activations
    if rule is None:
        return Rounded()
    if rule.element not in _ROUNDED or rule.scales not in (torch.float32, _POWERS) or not rule.separable:
        raise Refused(f"format {format.name}: no kernel that rounds activations so")
    high = ELEMENTS[rule.element].high
    exponent = math.frexp(high)[1] - 1 if rule.scales is _POWERS else -1
    return Rounded(rule.element, rule.columns, not rule.dynamic, high, rule.bound, exponent)


def _block(block: int, columns: int, name: str) -> int:
    """Return the columns of a block, at most `block`, that divide groups of `columns` columns. 0 stands for all."""
    if columns == 0 or columns % block == 0:
        return block
    if columns & (columns - 1):
        raise Refused(f"format {name}: no kernel for groups of {columns} columns")
    return columns
