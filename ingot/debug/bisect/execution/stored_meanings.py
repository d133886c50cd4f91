"""Check the recipe steps that read quantized checkpoints with an independent numpy implementation of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.ir.formats import ELEMENTS

Attrs = Mapping[str, Any]


def float_numbers(exponent: int, mantissa: int, bias: int) -> np.ndarray:
    """Return the number of each code of a small float type, from its bits. It has a sign, and no infinities."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    sign = np.where(codes >> (exponent + mantissa), -1.0, 1.0)
    power, rest = (codes >> mantissa) & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    inner = np.where(power > 0, 1.0, 0.0) + rest / float(1 << mantissa)
    made: np.ndarray = sign * inner * np.exp2(np.maximum(power, 1.0) - bias)
    return made


def _e4m3() -> np.ndarray:
    numbers = float_numbers(4, 3, 7)
    numbers[[127, 255]] = np.nan
    return numbers


def _e5m2() -> np.ndarray:
    numbers = float_numbers(5, 2, 15)
    for first, sign in ((124, 1), (252, -1)):
        numbers[first], numbers[first + 1 : first + 4] = sign * np.inf, np.nan
    return numbers


# The number of each code of an element type, where the code read as u8 is the index.
NUMBERS: Mapping[str, np.ndarray] = {
    "i8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64),
    "u8": np.arange(256.0),
    "i4": np.arange(16.0) - 8,
    "u4": np.arange(16.0),
    "f8e4m3": _e4m3(),
    "f8e5m2": _e5m2(),
    "f4e2m1": float_numbers(2, 1, 1),
    "f6e2m3": float_numbers(2, 3, 1),
    "f6e3m2": float_numbers(3, 2, 3),
    **{name: np.asarray(ELEMENTS[name].table) for name in ("nf4", "iq4nl")},  # tables without a rule
}


def _unpacked(words: np.ndarray, attrs: Attrs) -> np.ndarray:
    """Return the codes of the step "unpack": one by one from the bits of each row of words."""
    bits, order, size = attrs["bits"], list(attrs["order"]), attrs["size"]
    rows = np.ascontiguousarray(np.moveaxis(words, attrs["dim"], -1))
    flat = rows.reshape(-1, rows.shape[-1]).view(np.uint8).reshape(-1, rows.shape[-1] * rows.itemsize)
    single = np.unpackbits(flat, axis=1, bitorder="little")
    count = single.shape[1] // bits
    each = [single[:, place : count * bits : bits].astype(np.int64) << place for place in range(bits)]
    codes = np.add.reduce(each)
    if order:
        places = np.arange(count).reshape(-1, len(order))[:, order].ravel()
        codes = codes[:, places]
    codes = codes[:, : size or count].astype(np.uint8)
    made = codes.reshape(*rows.shape[:-1], codes.shape[1])
    return np.ascontiguousarray(np.moveaxis(made, -1, attrs["dim"]))


def _packed(codes: np.ndarray, attrs: Attrs) -> np.ndarray:
    if attrs["packing"] != "low_first":
        raise ValueError(f"the packing '{attrs['packing']}' has no known meaning")
    made: np.ndarray = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return made


def _ordered(groups: np.ndarray, attrs: Attrs) -> np.ndarray:
    return np.array(sorted(range(len(groups)), key=lambda place: (groups[place], place)), np.int32)


# Steps whose result has the bits that the function returns. Arguments are arrays with the bits of the tensors.
STORED_MOVES: Mapping[str, Callable[[Sequence[np.ndarray], Attrs], np.ndarray]] = {
    "unpack": lambda args, attrs: _unpacked(args[0], attrs),
    "pack": lambda args, attrs: _packed(args[0].astype(np.int64), attrs),
    "bitcast": lambda args, attrs: args[0],
    "shift": lambda args, attrs: ((args[0].astype(np.int64) + attrs["add"]) % (1 << attrs["bits"])).astype(np.uint8),
    "group_order": lambda args, attrs: _ordered(args[0], attrs),
    "gather": lambda args, attrs: args[0].take(args[1], axis=attrs["dim"]),
    "check_scales": lambda args, attrs: args[0],
    "lookup": lambda args, attrs: args[0].ravel()[args[1].astype(np.int64) % 256],
}
