"""Whether given tile sizes are such as kernels can have."""

from collections.abc import Sequence
from dataclasses import MISSING, fields

from ingot.backends.triton.lower.attention_problem import DECODE_ATTENTION, DecodeProblem
from ingot.backends.triton.lower.linear_problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear_tiles import MatvecTiles
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import OptionError

# Triton's tiles have powers of two along each side, and so are the warps of a block.
_TILES = frozenset({"block_n", "block_k", "keys"})
_POWERS = _TILES | {"warps"}
_MAY_BE_ZERO = frozenset({"lines", "ahead", "early"})
# The smallest operand of a tensor-core product in Triton has 16 elements along each side.
_LEAST_TILE = 16
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
            least, most = _range(kind, name)
            power = name not in _POWERS or size & (size - 1) == 0
            if not (least <= size <= most and power):
                what = "a power of two" if name in _POWERS else "a number"
                raise _refused(choice, f"has {name} {size}", f"{what} from {least} to {most}")
        if choice.tiles.get("block_n", 1) * choice.tiles.get("block_k", 1) > _MOST_ELEMENTS:
            raise _refused(choice, f"has tiles of {choice.tiles_text()}", f"{_MOST_ELEMENTS} elements at most")


def _range(kind: type, name: str) -> tuple[int, int]:
    """The least and the most that a size may be."""
    least = 0 if name in _MAY_BE_ZERO else 1
    if kind is not MatvecTiles and name in _TILES:
        least = _LEAST_TILE
    return least, _MOST.get(name, 1 << 10)


def _kind(choice: Choice) -> type:
    problem: type[DecodeProblem] | type[LinearProblem]
    if choice.kernel == DECODE_ATTENTION:
        problem, what = DecodeProblem, "attention of few tokens"
    elif choice.kernel == LINEAR:
        problem, what = LinearProblem, "product"
    else:
        raise _refused(choice, "is about a kernel that is not known", f"{LINEAR} or {DECODE_ATTENTION}")
    try:
        found = problem.of(choice)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(problem))
        raise _refused(choice, f"is about no {what}: {error}", f"{names}, as an artifact's log has them") from None
    return found.tiles_kind


def _refused(choice: Choice, what: str, expected: str) -> OptionError:
    return OptionError(f"a choice of the tuning log {what}", where=str(choice), expected=expected)
