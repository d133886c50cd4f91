"""The key of a matmul in the tuning log."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.linear_tiles import TILES, MatvecTiles, Product, Tiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.backends.triton.lower.weight import PLAIN
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES

LINEAR = "linear"
# The padded numbers of rows of x: one, or those of the tensor-core kernel.
ROWS = (1, *TILES)


@dataclass(frozen=True)
class LinearProblem:
    """A matmul as in a region: [`tokens`, `depth`] times [`depth`, `columns`], where `tokens` is a padded number.

    With `gated`, two rows of the weight make a column. `norm` and `residual` say whether these ops are fused. `dtype`
    is the IR name of the dtype of x and of the elements in the weight's `packing`, `result` that of the result.
    """

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
        """Return the problem of a choice. Raises TypeError or ValueError if it is not a matmul."""
        problem = read_problem(LinearProblem, choice)
        if problem.tokens not in ROWS or not {problem.dtype, problem.result} <= DTYPES.keys():
            raise ValueError(f"tokens {problem.tokens}, dtype '{problem.dtype}', result '{problem.result}'")
        return problem

    @property
    def tiles_kind(self) -> type[MatvecTiles] | type[Tiles]:
        """Return the class of the tiles: one row has its own kernel."""
        return MatvecTiles if self.tokens == 1 else Tiles

    @property
    def rows(self) -> int:
        """Return the rows of the weight."""
        return self.columns * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Return the bytes of the weight."""
        return self.rows * self.depth * DTYPES[self.dtype].itemsize

    def product(self) -> Product:
        return Product(self.columns, self.depth, self.gated, DTYPES[self.dtype])

    def fields(self) -> dict[str, bool | int | str]:
        """Return the fields for a choice. A plain packing is left out."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("packing", PLAIN)}
