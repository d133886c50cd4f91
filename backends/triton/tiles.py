"""Whether given tile sizes are such as kernels can have."""

from collections.abc import Sequence
from dataclasses import MISSING, fields

from ingot.backends.triton.lower.attention_tiles import DECODE_ATTENTION, DecodeTiles
from ingot.backends.triton.lower.linear_problem import LINEAR, LinearProblem
from ingot.ir.errors import OptionError
from ingot.ir.tuning import Choice

# Triton's tiles have powers of two along each side, and so are the warps of a block.
_POWERS = frozenset({"block_n", "block_k", "keys", "warps"})
_MAY_BE_ZERO = frozenset({"lines", "ahead"})
# A block has 1024 threads at most (CUDA C++ programming guide, technical specifications); a tile of more elements
# would not fit into its registers and takes Triton minutes.
_MOST = {"warps": 32, "block_n": 1 << 12, "block_k": 1 << 14, "keys": 1 << 10, "splits": 64, "stages": 16}
_MOST_ELEMENTS = 1 << 17


def check_tiles(choices: Sequence[Choice]) -> None:
    """Raises OptionError for a choice about no kernel, with other fields than its kernel has, or out of range."""
    for choice in choices:
        kind = _kind(choice)
        names = {field.name for field in fields(kind)}
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if not needed <= choice.tiles.keys() <= names:
            raise _refused(choice, f"has the tile sizes {', '.join(choice.tiles) or 'none'}", ", ".join(names))
        for name, size in choice.tiles.items():
            least = 0 if name in _MAY_BE_ZERO else 1
            power = name not in _POWERS or size & (size - 1) == 0
            if not (least <= size <= _MOST.get(name, 1 << 10) and power):
                what = "a power of two" if name in _POWERS else "a number"
                raise _refused(choice, f"has {name} {size}", f"{what} from {least} to {_MOST.get(name, 1 << 10)}")
        if choice.tiles.get("block_n", 1) * choice.tiles.get("block_k", 1) > _MOST_ELEMENTS:
            raise _refused(choice, f"has tiles of {choice.tiles_text()}", f"{_MOST_ELEMENTS} elements at most")


def _kind(choice: Choice) -> type:
    if choice.kernel == DECODE_ATTENTION:
        return DecodeTiles
    if choice.kernel != LINEAR:
        raise _refused(choice, "is about a kernel that is not known", f"{LINEAR} or {DECODE_ATTENTION}")
    try:
        return LinearProblem.of(choice).tiles_kind
    except TypeError:
        raise _refused(choice, "is no product", ", ".join(field.name for field in fields(LinearProblem))) from None


def _refused(choice: Choice, what: str, expected: str) -> OptionError:
    return OptionError(f"a choice of the tuning log {what}", where=str(choice), expected=expected)
