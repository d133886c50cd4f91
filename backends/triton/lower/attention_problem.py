"""What the tuning log knows attention of few tokens by."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.ir.tuning import Choice
from ingot.ir.types import DTYPES

DECODE_ATTENTION = "decode_attention"
# The largest step that is decoded where each sequence feeds one token: as many contexts can still be cut in two.
MOST_DECODED = 512


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of steps of up to `tokens` tokens over a cache of `kv_heads` heads of `dim` elements, in pages of
    `page` positions; `group` heads of q share one of them. With `append` q and k are prepared and k and v written in
    the same launch. `dtype` is that of all of them, by its IR name."""

    kv_heads: int
    group: int
    dim: int
    page: int
    dtype: str
    tokens: int
    append: bool

    @staticmethod
    def of(choice: Choice) -> "DecodeProblem":
        """What a choice is about. Raises TypeError or ValueError when that is no attention of few tokens."""
        problem = read_problem(DecodeProblem, choice)
        if problem.tokens > MOST_DECODED or problem.dtype not in DTYPES:
            raise ValueError(f"{problem.tokens} tokens of {problem.dtype}")
        return problem

    @property
    def tiles_kind(self) -> type[DecodeTiles]:
        return DecodeTiles

    @property
    def row_bytes(self) -> int:
        """Of one position of one head: keys alone."""
        return self.dim * DTYPES[self.dtype].itemsize

    def fields(self) -> dict[str, bool | int | str]:
        return asdict(self)
