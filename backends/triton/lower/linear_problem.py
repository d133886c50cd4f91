"""What the tuning log knows a product by, and the sizes that it may get."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.linear_tiles import TILES, MatvecTiles, Product, Tiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.backends.triton.lower.weight import PLAIN
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES

LINEAR = "linear"
# Of x, padded: one, or as many as a tensor-core product takes.
ROWS = (1, *TILES)


@dataclass(frozen=True)
class LinearProblem:
    """A product as a region has it: `columns` results of `depth` products each, for `tokens` rows, padded; `gated`: two
    rows of the weight make a column. `norm` and `residual` stand around it. `dtype` is that of x and of the elements
    that the weight's `packing` holds, `result` that of what comes out, by their IR names."""

    columns: int
    depth: int
    tokens: int
    dtype: str
    result: str
    gated: bool = False
    norm: bool = False
    residual: bool = False
    packing: str = PLAIN

    @staticmethod
    def of(choice: Choice) -> "LinearProblem":
        """What a choice is about. Raises TypeError or ValueError when that is no product."""
        problem = read_problem(LinearProblem, choice)
        if problem.tokens not in ROWS or not {problem.dtype, problem.result} <= DTYPES.keys():
            raise ValueError(f"{problem.tokens} rows of {problem.dtype}, giving {problem.result}")
        return problem

    @property
    def tiles_kind(self) -> type[MatvecTiles] | type[Tiles]:
        """One row has a kernel of its own."""
        return MatvecTiles if self.tokens == 1 else Tiles

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.columns * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Of the weight."""
        return self.rows * self.depth * DTYPES[self.dtype].itemsize

    def product(self) -> Product:
        return Product(self.columns, self.depth, self.gated, DTYPES[self.dtype])

    def fields(self) -> dict[str, bool | int | str]:
        """What a choice says of it; a plain weight is not mentioned."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("packing", PLAIN)}
