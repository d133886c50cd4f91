"""The description of a matmul of experts in the tuning log, by which its tile sizes are stored and found."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.experts.tiles import GroupTiles, RowTiles
from ingot.backends.triton.lower.linear.weight import PLAIN
from ingot.backends.triton.lower.problem import read_problem
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES

EXPERTS = "experts"


@dataclass(frozen=True)
class ExpertsProblem:
    """The properties of the experts' first or second matmul that its tile sizes depend on.

    Each of `experts` weights multiplies rows of `depth` elements and has `columns` results. `gated` is the first
    matmul: a result is activation(gate) * up, of two rows of the weight. Each token has `top_k` choices. `block` is the
    number of choices in a block; 1: each choice alone. `dtype` is the IR name of the dtype of rows, and of weights that
    are not quantized. `packing` is the format in which the weight is stored.
    """

    experts: int
    top_k: int
    columns: int
    depth: int
    gated: bool
    block: int
    dtype: str
    packing: str = PLAIN

    @staticmethod
    def of(choice: Choice) -> "ExpertsProblem":
        """Return the matmul for which `choice`, an entry of the tuning log, records tile sizes.

        Raises TypeError or ValueError if the entry does not describe a matmul of experts.
        """
        problem = read_problem(ExpertsProblem, choice)
        if (
            problem.dtype not in DTYPES
            or problem.block & (problem.block - 1)
            or 1 < problem.block < problem.least_block
        ):
            raise ValueError(f"block {problem.block}, dtype '{problem.dtype}'")
        return problem

    @property
    def least_block(self) -> int:
        """Return the choices of the smallest block. Only kernels for quantized weights and bf16 have blocks of 8."""
        return 8 if self.packing != PLAIN and self.dtype == "bf16" else 16

    @property
    def tiles_kind(self) -> type[RowTiles] | type[GroupTiles] | type[QuantMatvecTiles]:
        """Return the dataclass of the tile sizes.

        It is GroupTiles for blocks of choices, and for choices alone RowTiles, or QuantMatvecTiles if the weight is
        quantized.
        """
        if self.block > 1:
            return GroupTiles
        return RowTiles if self.packing == PLAIN else QuantMatvecTiles

    def fields(self) -> dict[str, bool | int | str]:
        """Return the fields by name, as the tuning log stores them. A plain weight has no `packing` there."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("packing", PLAIN)}
