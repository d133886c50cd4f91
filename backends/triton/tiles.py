"""Check that the tile sizes of a tuning log are ones that kernels support."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields

from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION, DecodeProblem
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import RowTiles
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear.tiles import MatvecTiles
from ingot.backends.triton.lower.quant.tiles import QUANT_MATVEC, QuantMatvecTiles
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import OptionError

# The sizes of Triton's tiles are powers of two, and so is the number of warps of a block.
_TILES = frozenset({"block_n", "block_k", "keys"})
_POWERS = _TILES | {"warps", "rows"}
_MAY_BE_ZERO = frozenset({"lines", "ahead", "early", "programs", "fetched", "cores", "registers"})
# The least size of an axis of an operand of `tl.dot`.
_LEAST_TILE = 16
# A block has at most 1024 threads (CUDA C++ programming guide, technical specifications). A tile of more elements would
# not fit into its registers and takes Triton minutes to compile.
_MOST = {
    "warps": 32,
    "block_n": 1 << 12,
    "block_k": 1 << 14,
    "keys": 1 << 10,
    "splits": 64,
    "stages": 16,
    "rows": 64,
    "held": 64,
    "cores": 1,
    "registers": 255,
}
_MOST_ELEMENTS = 1 << 17
# The class that an entry of the tuning log describes, by kernel, and the same in words.
_Problem = type[DecodeProblem] | type[ExpertsProblem] | type[LinearProblem]
_PROBLEMS: Mapping[str, tuple[_Problem, str]] = {
    LINEAR: (LinearProblem, "a matmul"),
    QUANT_MATVEC: (LinearProblem, "a matmul"),
    EXPERTS: (ExpertsProblem, "a matmul of experts"),
    DECODE_ATTENTION: (DecodeProblem, "decode attention"),
}


def check_tiles(choices: Sequence[Choice]) -> None:
    """Check that kernels support the tile sizes in a tuning log. `choices` are its entries.

    Raises OptionError for an unknown kernel, a wrong description of its call, and an unknown, missing or unsupported
    tile size.
    """
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
            raise _refused(choice, f"has tiles of {choice.tiles_text()}", f"at most {_MOST_ELEMENTS} elements")


def _range(kind: type, name: str) -> tuple[int, int]:
    """Return the least and the greatest allowed value of the tile size `name`, a field of the dataclass `kind`."""
    least = 0 if name in _MAY_BE_ZERO else 1
    if kind not in (MatvecTiles, RowTiles) and name in _TILES:
        least = _LEAST_TILE
    return least, _MOST.get(name, 1 << 10)


def _kind(choice: Choice) -> type:
    """Return the dataclass for the tile sizes that `choice`, an entry of a tuning log, records.

    Raises OptionError for an unknown kernel or an invalid description of its call.
    """
    if choice.kernel not in _PROBLEMS:
        raise _refused(choice, "is for an unknown kernel", f"{', '.join(_PROBLEMS)}")
    problem, what = _PROBLEMS[choice.kernel]
    try:
        found = problem.of(choice)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(problem))
        raise _refused(
            choice, f"does not describe {what}: {error}", f"{names}, as an artifact's log has them"
        ) from None
    return QuantMatvecTiles if choice.kernel == QUANT_MATVEC else found.tiles_kind


def _refused(choice: Choice, what: str, expected: str) -> OptionError:
    return OptionError(f"a choice of the tuning log {what}", where=str(choice), expected=expected)
