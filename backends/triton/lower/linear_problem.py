"""What the tuning log knows a product by, and the sizes that it may get."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Product, Tiles
from ingot.ir.tuning import Choice
from ingot.ir.types import DTYPES

LINEAR = "linear"


@dataclass(frozen=True)
class LinearProblem:
    """A product as a region has it: `columns` results of `depth` products each, for `tokens` rows, padded; `gated`: two
    rows of the weight make a column. `norm` and `residual` stand around it. `dtype` is that of x and of the weight,
    `result` that of what comes out, by their IR names."""

    columns: int
    depth: int
    tokens: int
    dtype: str
    result: str
    gated: bool = False
    norm: bool = False
    residual: bool = False

    @staticmethod
    def of(choice: Choice) -> "LinearProblem":
        fields: Mapping[str, Any] = choice.problem
        return LinearProblem(**fields)

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
        return asdict(self)
