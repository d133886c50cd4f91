"""Element types of quantized weights: how a stored code stands for a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Element:
    """A type of numbers that are stored as codes.

    name      its name in formats
    bits      the bits of a code
    storage   the dtype of one code that is not packed
    low       the smallest number to which values are rounded
    high      the largest one
    offset    for integers: the number of a code is `code - offset`
    table     the number of each code, by code; empty: the code is the number (after `offset`)
    """

    name: str
    bits: int
    storage: torch.dtype
    low: float
    high: float
    offset: int = 0
    table: tuple[float, ...] = ()

    @property
    def integer(self) -> bool:
        return not self.table and not self.storage.is_floating_point

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the distinct numbers of the table in order, the bounds between them, and the code of each."""
        code_of: dict[float, int] = {}
        for code, number in enumerate(self.table):
            code_of.setdefault(number, code)  # 0 and -0 are equal, and the first is 0
        numbers = torch.tensor(sorted(code_of), dtype=torch.float64, device="cpu")
        codes = torch.tensor([code_of[number] for number in sorted(code_of)], dtype=torch.uint8, device="cpu")
        return numbers, (numbers[1:] + numbers[:-1]) / 2, codes

    def numbers(self) -> torch.Tensor:
        """Return the finite numbers of all codes in order, as float64."""
        if self.table:
            return self._sorted[0]
        if self.integer:
            return torch.arange(self.low, self.high + 1, dtype=torch.float64, device="cpu")
        found = torch.arange(256, dtype=torch.uint8, device="cpu").view(self.storage).double()
        finite: torch.Tensor = found[found.isfinite()].unique()
        return finite

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of `codes` in `dtype`, with the same shape. Every number is exact in float32."""
        if self.table:
            table: torch.Tensor = torch.tensor(self.table, dtype=dtype, device=codes.device)
            return table[codes.long()]
        numbers = codes.to(dtype)
        return numbers - self.offset if self.offset else numbers

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of the numbers that are nearest to `values`. Values beyond the range become its ends.

        A tie goes to the even code.
        """
        if self.table:
            _, bounds, codes = (one.to(values.device) for one in self._sorted)
            wide = values.double()
            lower, upper = (torch.bucketize(wide, bounds, right=right) for right in (False, True))
            return torch.where(codes[upper] % 2 == 0, codes[upper], codes[lower])
        held = values.clamp(self.low, self.high)
        return (held.round() + self.offset).to(self.storage) if self.integer else held.to(self.storage)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that are nearest to `values`, in their dtype. NaN stays NaN."""
        if self.integer:
            return values.round().clamp(self.low, self.high)
        found = self.decode(self.encode(values), values.dtype)
        return torch.where(values.isnan(), values, found) if self.table else found


def _floats(exponent: int, mantissa: int, bias: int) -> tuple[float, ...]:
    """Return the numbers of a small float type without infinities and NaN, by code.

    The type has a sign, `exponent` bits and `mantissa` bits (OCP Microscaling Formats 1.0, section 5.3).
    """
    made = []
    for code in range(1 << (exponent + mantissa)):
        high, low = code >> mantissa, code & ((1 << mantissa) - 1)
        made.append((low + (1 << mantissa) * (high > 0)) / (1 << mantissa) * 2.0 ** (max(high, 1) - bias))
    return (*made, *(-number for number in made))


# The quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E), as bitsandbytes rounds them to float32.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# llama.cpp, ggml-common.h, kvalues_iq4nl.
_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

ELEMENTS: dict[str, Element] = {}


def register_element(made: Element) -> Element:
    """Register an element type by its name. Raises InternalError if the name is taken."""
    if made.name in ELEMENTS:
        raise InternalError(f"the element type '{made.name}' is defined twice")
    ELEMENTS[made.name] = made
    return made


def _table(name: str, bits: int, numbers: tuple[float, ...]) -> None:
    register_element(Element(name, bits, torch.uint8, min(numbers), max(numbers), table=tuple(map(float, numbers))))


# Rounding to i8 and i4 leaves the lowest number out, so that the range is symmetric. Checkpoints may use it.
register_element(Element("i8", 8, torch.int8, -127, 127))
register_element(Element("u8", 8, torch.uint8, 0, 255))
register_element(Element("i4", 4, torch.uint8, -7, 7, offset=8))
register_element(Element("u4", 4, torch.uint8, 0, 15))
for _name, _dtype in (("f8e4m3", torch.float8_e4m3fn), ("f8e5m2", torch.float8_e5m2)):
    _most = torch.finfo(_dtype).max
    register_element(Element(_name, 8, _dtype, -_most, _most))
_table("f4e2m1", 4, _floats(2, 1, 1))
_table("f6e2m3", 6, _floats(2, 3, 1))
_table("f6e3m2", 6, _floats(3, 2, 3))
_table("nf4", 4, _NF4)
_table("iq4nl", 4, _IQ4NL)

# The dtypes that scales may have, by name.
SCALE_DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e8m0": torch.float8_e8m0fnu,
}


def round_scale(scale: torch.Tensor, dtype: torch.dtype, element: Element) -> torch.Tensor:
    """Return `scale`, a positive tensor, as it is stored in `dtype`: not rounded, in its own dtype.

    A scale in f8e8m0 is a power of two: that of the largest number divided by that of the element type's largest
    number (OCP Microscaling Formats 1.0, section 6.3). `scale` is the largest number divided by `element.high`.
    """
    if dtype is not torch.float8_e8m0fnu:
        return scale.clamp(max=torch.finfo(dtype).max).to(dtype).to(scale.dtype)
    whole = torch.floor(torch.log2(scale * element.high)) - torch.floor(
        torch.log2(torch.tensor(element.high, dtype=scale.dtype, device=scale.device))
    )
    return torch.exp2(whole.clamp(-127, 127))
