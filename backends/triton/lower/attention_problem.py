"""What the tuning log knows attention of few tokens by."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.ir.artifact.tuning import Choice
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.types import DTYPES

DECODE_ATTENTION = "decode_attention"
# The largest step that is decoded where each sequence feeds one token: as many contexts can still be cut in two.
MOST_DECODED = 512
# A cache in the dtype of q, as `--kv-cache-dtype` says it; and one whose values are as wide as keys, beside them.
AUTO, EQUAL = "auto", "equal"
_VALUES, _LATENT = "values", "latent"


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of steps of up to `tokens` tokens over a cache of `kv_heads` heads of `dim` elements, in pages of
    `page` positions; `group` heads of q share one of them. With `append` q and k are prepared and k and v written in
    the same launch. `dtype` is that of q, k and v by its IR name, `cache_dtype` that of the cache.

    `form` is "equal", "values_N" for values of N numbers beside keys, or "latent_N" where they are the first N numbers
    of keys (`ingot.ir.cache.form`). `sharing` of the `kv_heads` groups read one head of the cache.
    """

    kv_heads: int
    group: int
    dim: int
    page: int
    dtype: str
    tokens: int
    append: bool
    cache_dtype: str = AUTO
    form: str = EQUAL
    sharing: int = 1

    @staticmethod
    def of(choice: Choice) -> "DecodeProblem":
        """What a choice is about. Raises TypeError or ValueError when that is no attention of few tokens."""
        problem = read_problem(DecodeProblem, choice)
        if problem.tokens > MOST_DECODED or not {problem.dtype, problem.cached_as} <= DTYPES.keys():
            raise ValueError(f"{problem.tokens} tokens of {problem.dtype} over {problem.cached_as}")
        if problem.kv_heads % problem.sharing:
            raise ValueError(f"{problem.kv_heads} groups, of which {problem.sharing} read one head")
        try:
            named = form_name(problem.cache_form)
        except (ValueError, VerifyError):
            named = ""
        if named != problem.form:
            raise ValueError(f"form is {problem.form!r}")
        return problem

    @property
    def tiles_kind(self) -> type[DecodeTiles]:
        return DecodeTiles

    @property
    def cached_as(self) -> str:
        """The dtype of the cache."""
        return self.dtype if self.cache_dtype == AUTO else self.cache_dtype

    @property
    def cache_form(self) -> CacheForm:
        kind, _, width = self.form.partition("_")
        return CacheForm(self.dim, self.dim if kind == EQUAL else int(width), shared=kind == _LATENT)

    @property
    def cache_heads(self) -> int:
        return self.kv_heads // self.sharing

    @property
    def row_bytes(self) -> int:
        """Of one position of one head: keys alone."""
        return self.dim * DTYPES[self.cached_as].itemsize

    @property
    def position_bytes(self) -> int:
        """Of keys and values of one position."""
        form = self.cache_form
        return self.cache_heads * form.parts * form.row * DTYPES[self.cached_as].itemsize

    def fields(self) -> dict[str, bool | int | str]:
        return asdict(self)


def form_name(form: CacheForm) -> str:
    """How a problem names the form of a cache."""
    if form.equal:
        return EQUAL
    return f"{_LATENT if form.shared else _VALUES}_{form.value_width}"
