"""Check recipe steps with an independent implementation of each.

Steps that move elements are repeated by index arithmetic in numpy. Steps that compute are repeated in float64, with a
bound on the rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ingot.debug.bisect.execution.recipe_tables import expected_table
from ingot.debug.bisect.execution.stored_meanings import NUMBERS, STORED_MOVES
from ingot.debug.bisect.execution.tensor_check import raw_bits
from ingot.ir.formats import ELEMENTS, Format, find_format
from ingot.ir.formats.format import KEPT
from ingot.ir.recipe import Results
from ingot.ir.stored.gguf_blocks import BLOCK_TYPES
from ingot.ir.types import DTYPES

Attrs = Mapping[str, Any]
Tensors = Sequence[torch.Tensor]
# Half the relative distance between adjacent values: the error bound of one rounding to nearest.
_HALF = 0.5 * (1 + 1e-9)


def step_problem(step: str, args: Tensors, attrs: Attrs, result: Results) -> str | None:
    """Check the result of a recipe step against independent numpy code. Return what is wrong, in words; None if it is
    right.

    A recipe makes a weight from checkpoint tensors in such steps. `step` is the kind of step, such as "cast". `args`
    are its input tensors, and `attrs` its attributes.
    """
    results = result if isinstance(result, dict) else {"": result}
    if step in _MOVED:
        wanted = _MOVED[step]([_numbers(arg) for arg in args], attrs)
        dtype = _RESULTS.get(step) or (DTYPES[attrs["dtype"]] if step == "bitcast" else args[0].dtype)
        for name, array in wanted.items() if isinstance(wanted, dict) else [("", wanted)]:
            if name not in results:
                return f"it has no result '{name}'"
            if problem := _differs(results[name], array, dtype):
                return f"{name}: {problem}" if name else problem
        return None
    if step in _COMPUTED:
        return _COMPUTED[step](args, attrs, results)
    return f"the step '{step}' has no known meaning"


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements as an array of integers with the same bits, for exact comparison."""
    return raw_bits(tensor.contiguous()).numpy()


def _differs(found: torch.Tensor, wanted: np.ndarray, dtype: torch.dtype) -> str | None:
    if found.dtype is not dtype or tuple(found.shape) != wanted.shape:
        return f"it is {found.dtype} {list(found.shape)}, expected {dtype} {list(wanted.shape)}"
    places = np.argwhere(_numbers(found) != wanted)
    if not len(places):
        return None
    bits = torch.from_numpy(np.ascontiguousarray(wanted[tuple(places[0])])).reshape(1)
    expected = bits.view(dtype) if dtype is not torch.bool else bits
    return _at(places[0], found, float(expected[0]), len(places))


def _at(place: Any, found: torch.Tensor, expected: float, count: int) -> str:
    index = tuple(int(i) for i in place)
    return f"{float(found[index]):.7g} at {list(index)}, expected {expected:.7g}; {count} of {found.numel()} wrong"


# --- steps that move elements ----------------------------------------------------------------------------------------


def _taken(array: np.ndarray, dim: int, places: Sequence[int]) -> np.ndarray:
    return array.take(np.asarray(places, dtype=np.int64), axis=dim)


def _sliced(array: np.ndarray, attrs: Attrs) -> np.ndarray:
    size = array.shape[attrs["dim"]]
    every = attrs.get("every", size)
    return _taken(array, attrs["dim"], [at for at in range(size) if attrs["begin"] <= at % every < attrs["end"]])


def _split(array: np.ndarray, attrs: Attrs) -> dict[str, np.ndarray]:
    begins = np.cumsum([0, *attrs["sizes"]])
    return {
        f"part{index}": _taken(array, attrs["dim"], range(begin, begin + size))
        for index, (begin, size) in enumerate(zip(begins, attrs["sizes"], strict=False))
    }


def _sharded(array: np.ndarray, attrs: Attrs) -> np.ndarray:
    rank, world, dim = attrs["rank"], attrs["world"], attrs["dim"]
    places: list[int] = []
    begin = 0
    for size in attrs["segments"] or [array.shape[dim]]:
        own = size // world
        places += range(begin + rank * own, begin + (rank + 1) * own)
        begin += size
    return _taken(array, dim, places)


def _padded(array: np.ndarray, attrs: Attrs) -> np.ndarray:
    dim = attrs["dim"]
    shape = [*array.shape]
    shape[dim] = attrs["size"]
    padded = np.zeros(shape, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


def _repeated(array: np.ndarray, attrs: Attrs) -> np.ndarray:
    dim, times = attrs["dim"], attrs["times"]
    return _taken(array, dim, [place // times for place in range(array.shape[dim] * times)])


_MOVED: Mapping[str, Callable[[list[np.ndarray], Attrs], np.ndarray | dict[str, np.ndarray]]] = {
    "source": lambda args, attrs: args[0],
    "slice": lambda args, attrs: _sliced(args[0], attrs),
    "concat": lambda args, attrs: np.concatenate(args, attrs["dim"]),
    "stack": lambda args, attrs: np.stack(args, attrs["dim"]),
    "reshape": lambda args, attrs: args[0].ravel(order="C").reshape(attrs["shape"], order="C"),
    "permute": lambda args, attrs: np.ascontiguousarray(np.transpose(args[0], attrs["dims"])),
    "pad": lambda args, attrs: _padded(args[0], attrs),
    "repeat": lambda args, attrs: _repeated(args[0], attrs),
    "shard": lambda args, attrs: _sharded(args[0], attrs),
    "split": lambda args, attrs: _split(args[0], attrs),
    **STORED_MOVES,
}
# Steps whose results have another dtype than their first argument.
_RESULTS = {"unpack": torch.uint8, "pack": torch.uint8, "shift": torch.uint8, "group_order": torch.int32}


# --- steps that compute ----------------------------------------------------------------------------------------------


def _double(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.double().contiguous().numpy()
    return array


def _beyond(found: torch.Tensor, wanted: np.ndarray, allowed: np.ndarray | float) -> str | None:
    """Describe the elements of `found` that differ from `wanted` by more than `allowed`. Return None if there are
    none."""
    if tuple(found.shape) != wanted.shape:
        return f"its shape is {list(found.shape)}, expected {list(wanted.shape)}"
    with np.errstate(invalid="ignore"):
        error = np.abs(_double(found) - wanted)
    wrong = ~((error <= allowed) | (_double(found) == wanted) | (np.isnan(wanted) & np.isnan(_double(found))))
    places = np.argwhere(wrong)
    return _at(places[0], found, float(wanted[tuple(places[0])]), len(places)) if len(places) else None


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _cast(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    """Check the result of a cast. Return what is wrong; None if nothing is.

    A cast to a floating-point dtype must round to the nearest value. A cast to integers must drop the fraction.
    """
    found = results[""]
    wanted = _double(args[0])
    if not found.is_floating_point():
        return _beyond(found, np.trunc(wanted), 0.0)
    info = torch.finfo(found.dtype)
    # The distance between adjacent values of the dtype. Below the smallest normal number it stays constant.
    spacing = info.eps * np.exp2(np.floor(np.log2(np.maximum(np.abs(wanted), info.tiny))))
    overflows = (np.abs(wanted) >= info.max + spacing / 4) & ~np.isfinite(_double(found))
    return _beyond(found, np.where(overflows, _double(found), wanted), _HALF * spacing)


def _affine(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    """Check a step that computes `scale * x + offset`. Return what is wrong; None if nothing is.

    The step must compute in float32 or a wider dtype. It may round once per operation, and once to the result's dtype.
    """
    found, scaled = results[""], _double(args[0]) * attrs["scale"]
    wanted = scaled + attrs["offset"]
    inner = _unit(torch.promote_types(args[0].dtype, torch.float32))
    allowed = inner * (2 * np.abs(scaled) + abs(attrs["offset"])) + _unit(found.dtype) * np.abs(wanted)
    return _beyond(found, wanted, allowed) if found.dtype is args[0].dtype else f"it is {found.dtype}"


def _normalize(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    found, rows = results[""], _double(args[0])
    lengths = np.maximum(np.sqrt(np.einsum("...k,...k->...", rows, rows)), 1e-12)
    wanted = rows / lengths[..., None]
    tiny = torch.finfo(found.dtype).tiny  # below it, adjacent values have a constant distance
    # Sums of float64 in any order, and one rounding at the end.
    return _beyond(found, wanted, (1e-12 + _unit(found.dtype)) * np.maximum(np.abs(wanted), tiny))


def _matmul(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    found, (left, right) = results[""], map(_double, args)
    wanted = np.einsum("...nk,...km->...nm", left, right)
    # Sums of float64 in any order, and one rounding at the end.
    slack = 1e-12 * np.einsum("...nk,...km->...nm", np.abs(left), np.abs(right))
    return _beyond(found, wanted, slack + _unit(found.dtype) * np.abs(wanted))


def _add(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    found, wanted = results[""], _double(args[0]) + _double(args[1])
    return _beyond(found, wanted, _unit(found.dtype) * np.abs(wanted))


def _table(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    return _beyond(results[""], *expected_table(attrs))


def _elements(weight: torch.Tensor, format: Format) -> np.ndarray:
    """Return the numbers of a weight's stored codes, before any scale."""
    if format.packing not in ("plain", "low_first"):  # only their own code defines their order
        stored = _numbers(format.layout.unpack(weight))
    else:
        stored = _numbers(weight)
    codes = stored.view(np.uint8)
    if format.packing == "low_first":
        wide = np.empty((codes.shape[0], codes.shape[1] * 2), np.uint8)
        wide[:, 0::2], wide[:, 1::2] = codes % 16, codes // 16
        codes = wide
    numbers: np.ndarray = NUMBERS[format.element][codes]
    return numbers


def _per_element(part: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Expand scales, zero points or offsets of a quantized weight to one for each element. Return an array of `shape`.

    `part` holds one for each block of elements, of `block` rows and columns; 0: all of them.
    """
    rows, columns = np.indices(shape)
    each: np.ndarray = _double(part)[rows // (block[0] or shape[0]), columns // (block[1] or shape[1])]
    return each


def _affinity(parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], format: Format) -> tuple[np.ndarray, ...]:
    """Return the scale, the zero point and the offset of each element."""
    each = {
        part: _per_element(parts[part], shape, format.block(part))
        for part in ("scales", "zeros", "offsets", "outer")
        if part in format.parts
    }
    scale = each["scales"] * each.get("outer", 1.0)
    return scale, each.get("zeros", np.zeros(shape)), each.get("offsets", np.zeros(shape))


def _moved(found: torch.Tensor, wanted: torch.Tensor, format: Format) -> str | None:
    """Check that a packed weight `found` holds the numbers of `wanted` unchanged. Return what is wrong; None if nothing
    is.

    The format is lossless: it only stores the elements in another order.
    """
    return _differs(format.layout.unpack(found).contiguous(), _numbers(wanted), wanted.dtype)


def _quantize(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    """Check a quantized weight. Return what is wrong; None if nothing is.

    Elements must be in the format's range, and the nearest to the numbers. In a format with zero points, elements at an
    end of the range may be off by a whole step. Each scale must be the smallest one that covers the numbers of its
    block.
    """
    format = find_format(attrs["format"])
    if results.keys() != set(format.parts):
        return f"it has the results {', '.join(results)}, expected {', '.join(format.parts)}"
    if args[0].dim() == 3:  # a stack of matrices, each quantized by itself
        if wrong := [part for part, one in results.items() if len(one) != len(args[0])]:
            return f"{wrong[0]}: {len(results[wrong[0]])} matrices, expected {len(args[0])}"
        own = ({part: one[index] for part, one in results.items()} for index in range(len(args[0])))
        checked = zip(args[0], own, strict=True)
        return next((found for matrix, parts in checked if (found := _quantize([matrix], attrs, parts))), None)
    wanted = _double(args[0])
    for part, value_type in format.types(wanted.shape, args[0].dtype).items():
        if problem := value_type.mismatch(results[part].contiguous()):
            return f"{part}: {problem}"
    if format.element == KEPT:
        return _moved(results["weight"], args[0], format)
    if len(args) > 1:  # a calibration has chosen the elements, so they need not be the nearest
        stored = zip(format.parts, args[1:], strict=True)
        return next((f"{part} is not the stored one" for part, one in stored if not _same(results[part], one)), None)
    element, level = ELEMENTS[format.element], format.levels[0]
    numbers = _elements(results["weight"], format)
    if not (numbers.min() >= element.low and numbers.max() <= element.high):
        return f"elements from {numbers.min():g} to {numbers.max():g}, expected {element.low:g} to {element.high:g}"
    scale, zero, offset = _affinity(results, wanted.shape, format)
    at_end = level.zeros & ((numbers == element.low) | (numbers == element.high))
    standing = torch.from_numpy((numbers - zero) * scale + offset)
    steps = np.where(at_end, 1.0, _half_gaps((wanted - offset) / scale, format)) * scale
    # Codes are computed in float32, so a value this close to a tie may round either way.
    if problem := _beyond(standing, wanted, steps * (1 + 1e-5) + 1e-6 * np.abs(wanted)):
        return f"more than half a step off: {problem}"
    return _wrong_scales(results, wanted, format)


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype is wanted.dtype and np.array_equal(_numbers(found), _numbers(wanted))


def _half_gaps(values: np.ndarray, format: Format) -> np.ndarray:
    """Return half the distance between the elements around each value, in units of the scale.

    A scale that is a power of two leaves the largest values of a block beyond the largest element.
    """
    if ELEMENTS[format.element].integer:
        return np.full(values.shape, 0.5)
    numbers = np.unique(NUMBERS[format.element][np.isfinite(NUMBERS[format.element])])
    half: np.ndarray = np.diff(numbers)[np.searchsorted(numbers[1:-1], values)] / 2
    beyond = np.abs(values) - numbers[-1] if format.levels[0].dtype is torch.float8_e8m0fnu else 0.0
    wider: np.ndarray = np.maximum(half, beyond)
    return wider


def _wrong_scales(parts: Mapping[str, torch.Tensor], weight: np.ndarray, format: Format) -> str | None:
    level, element = format.levels[0], ELEMENTS[format.element]
    rows, columns = level.rows or weight.shape[0], level.columns or weight.shape[1]
    down, along = level.grid((weight.shape[0], weight.shape[1]))
    whole = np.zeros((down * rows, along * columns))
    whole[: weight.shape[0], : weight.shape[1]] = weight
    blocks = whole.reshape(down, rows, along, columns)
    most, least = blocks.max((1, 3)), blocks.min((1, 3))
    ranged = level.zeros or level.offsets
    spread = np.maximum(most, 0) - np.minimum(least, 0) if ranged else np.maximum(np.abs(most), np.abs(least))
    found = _double(parts["scales"])
    if "outer" in parts:
        outer = format.block("outer")
        found = found * _per_element(parts["outer"], (down, along), (min(outer[0], 1), min(outer[1], 1)))
    tiny = float(torch.finfo(torch.float32).tiny)
    if level.dtype is torch.float8_e8m0fnu:
        wanted = np.exp2(
            np.maximum(np.floor(np.log2(np.maximum(spread, tiny))) - np.floor(np.log2(element.high)), -127)
        )
        problem = _beyond(torch.from_numpy(found), wanted, np.where(spread > tiny, 0.0, 4 * tiny))
    else:
        wanted = np.maximum(spread / (element.high - element.low if ranged else element.high), tiny)
        # A scale of few bits has a smallest number, which blocks of small weights take.
        slack = 0.0 if level.dtype.itemsize > 2 else float(found.min())
        problem = _beyond(torch.from_numpy(found), wanted, 4 * _unit(level.dtype) * wanted + slack)
    return f"scales: {problem}" if problem else None


def _dequantize(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    format = find_format(attrs["format"])
    if format.element == KEPT:
        return _moved(args[0], results[""], format)
    parts = dict(zip(format.parts, args, strict=True))
    numbers = _elements(parts["weight"], format)
    scale, zero, offset = _affinity(parts, numbers.shape, format)
    scaled = (numbers - zero) * scale
    wanted = scaled + offset
    allowed = _unit(results[""].dtype) * (2 * np.abs(scaled) + np.abs(wanted))
    if format.ordered:
        places = np.argsort(_numbers(parts["order"]))
        wanted, allowed = wanted[:, places], allowed[:, places]
    for part, axis in (("rotation_in", 1), ("rotation_out", 0)):
        if part in parts:
            turn = _double(parts[part]) if axis else _double(parts[part]).T
            # A sum of products of float32 is off by at most their number of roundings.
            products = _turned(np.abs(wanted), np.abs(turn), axis)
            allowed = _turned(allowed, np.abs(turn), axis) + 2 * len(turn) * _unit(results[""].dtype) * products
            wanted = _turned(wanted, turn, axis)
    return _beyond(results[""], wanted, allowed)


def _turned(matrix: np.ndarray, turn: np.ndarray, axis: int) -> np.ndarray:
    """Return a matrix with each run of its rows (axis 0) or columns (axis 1) multiplied by `turn` from the left."""
    runs = np.moveaxis(matrix, axis, 0)
    made: np.ndarray = (turn @ runs.reshape(-1, len(turn), runs.shape[1])).reshape(runs.shape)
    return np.moveaxis(made, 0, axis)


def _gguf_blocks(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    """Check codes, scales and offsets of GGUF's blocks by the weight that they make, against the package `gguf`."""
    import gguf  # a checkpoint of such blocks is read by this package

    kind = BLOCK_TYPES[attrs["type"]]
    wanted = gguf.quants.dequantize(args[0].contiguous().numpy(), gguf.GGMLQuantizationType[attrs["type"]])
    numbers = NUMBERS[kind.element][_numbers(results["weight"]).view(np.uint8)]
    scaled = numbers * _double(results["scales"]).repeat(kind.group, 1)
    offset = _double(results["offsets"]).repeat(kind.group, 1) if kind.offsets else 0.0
    allowed = 2 * _unit(torch.float32) * (np.abs(scaled) + np.abs(offset))
    return _beyond(torch.from_numpy(scaled + offset), wanted.astype(np.float64), allowed)


def _multiply(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    wanted = _double(args[0]) * _double(args[1])
    return _beyond(results[""], wanted, _unit(torch.float32) * np.abs(wanted))


def _reciprocal(args: Tensors, attrs: Attrs, results: Mapping[str, torch.Tensor]) -> str | None:
    wanted = 1.0 / _double(args[0])
    return _beyond(results[""], wanted, _unit(torch.float32) * np.abs(wanted))


_COMPUTED: Mapping[str, Callable[[Tensors, Attrs, Mapping[str, torch.Tensor]], str | None]] = {
    "cast": _cast,
    "affine": _affine,
    "normalize": _normalize,
    "matmul": _matmul,
    "add": _add,
    "table": _table,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gguf_blocks": _gguf_blocks,
    "multiply": _multiply,
    "reciprocal": _reciprocal,
}
