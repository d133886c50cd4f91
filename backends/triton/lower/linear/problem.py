"""The description of a matmul in the tuning log, by which its tile sizes are stored and found."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.linear.tiles import TILES, MatvecTiles, Product, Tiles
from ingot.backends.triton.lower.linear.weight import PLAIN
from ingot.backends.triton.lower.problem import read_problem
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES

LINEAR = "linear"
# The rows of x that matmul kernels are compiled for: one, or those of the tensor-core kernel.
ROWS = (1, *TILES)


@dataclass(frozen=True)
class LinearProblem:
    """The properties of a matmul that its tile sizes depend on: its key in the tuning log.

    It multiplies [`tokens`, `depth`] by [`depth`, `columns`]. `tokens` is the number of rows of x that the kernel is
    compiled for. With `gated`, a column of the result is activation(gate) * up, so the weight has two rows per column.
    `norm` and `residual` say whether these ops are fused. `dtype` is the IR name of the dtype of x and the weight, and
    `result` the one of the result. `packing` is the order in which the weight is stored.
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
        """Return the matmul for which `choice`, an entry of the tuning log, records tile sizes.

        Raises TypeError or ValueError if the entry does not describe a matmul.
        """
        problem = read_problem(LinearProblem, choice)
        if problem.tokens not in ROWS or not {problem.dtype, problem.result} <= DTYPES.keys():
            raise ValueError(f"tokens {problem.tokens}, dtype '{problem.dtype}', result '{problem.result}'")
        return problem

    @property
    def tiles_kind(self) -> type[MatvecTiles] | type[Tiles]:
        """Return the dataclass of the tile sizes: MatvecTiles for one row of x, Tiles for several rows."""
        return MatvecTiles if self.tokens == 1 else Tiles

    @property
    def rows(self) -> int:
        """Return the number of rows of the weight."""
        return self.columns * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Return the bytes of the unpacked weight."""
        return self.rows * self.depth * DTYPES[self.dtype].itemsize

    def product(self) -> Product:
        """Return the matmul without its fused norm and residual: its key in the tables of measured tile sizes."""
        return Product(self.columns, self.depth, self.gated, DTYPES[self.dtype])

    def fields(self) -> dict[str, bool | int | str]:
        """Return the fields by name, as the tuning log stores them. An unpacked weight has no `packing` there."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("packing", PLAIN)}
